"""Errors users see when a model and the cache do not fit together."""


class NotCapturableError(RuntimeError):
    """A decode step that depends on something the host knows, which a captured step would keep as it was."""


class HandOverError(RuntimeError):
    """Keys and values given to the cache did not reach the `diffkv` attention function unchanged."""


class CacheNotUsedError(HandOverError):
    """A model computed with another cache than `generate()` was given, or with none."""


class ModelInUseError(RuntimeError):
    """A model that `generate()` and continuous batching would use at once, each with an attention of its own."""


class UnsupportedModelError(ValueError):
    """The model's attention cannot work with this cache."""


def forward_under_way() -> HandOverError:
    """The error for whoever looks at a cache from within a forward."""
    return HandOverError("a forward is under way; look at the cache when it has returned.")


def stopped_halfway() -> HandOverError:
    """The error for layers that disagree about how many tokens they have seen."""
    return HandOverError(
        "an earlier forward with this cache stopped halfway, so its layers disagree; call cache.reset() and start over."
    )
