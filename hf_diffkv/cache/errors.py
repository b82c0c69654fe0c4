"""Errors for models and caches that do not match."""


class NotCapturableError(RuntimeError):
    """A decode step depends on a value on the host, which a captured step would freeze."""


class HandOverError(RuntimeError):
    """Keys and values given to the cache did not reach the `diffkv` attention function unchanged."""


class CacheNotUsedError(HandOverError):
    """A model used a cache other than the one `generate()` was given, or none."""


class ModelInUseError(RuntimeError):
    """`generate()` and continuous batching would use a model at the same time, each with its own attention."""


class UnsupportedModelError(ValueError):
    """The model's attention cannot work with this cache."""


def forward_under_way() -> HandOverError:
    """Returns the error for reading or changing a cache from within a forward."""
    return HandOverError("a forward is in progress; inspect the cache after it has returned.")


def stopped_halfway() -> HandOverError:
    """Returns the error for a cache whose last forward or change did not finish."""
    return HandOverError(
        "an earlier forward with this cache, or another change to it, stopped halfway, so its contents are "
        "incomplete; call cache.reset() and start over."
    )


def another_batch(held: int, given: int) -> ValueError:
    """Returns the error for a forward of `given` sequences with a cache that holds `held`."""
    return ValueError(
        f"this cache holds {held} sequences but the model was called with {given}; use a new DiffKVCache for another "
        "batch, or call batch_repeat_interleave or batch_select_indices first."
    )
