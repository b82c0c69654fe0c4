"""Errors for what went wrong on the device, and for budgets that are too small."""

from __future__ import annotations

from torch import Tensor

from ..config import DiffKVConfig

# divisor of the budget that gives the part kept for tables that grow before the next look at the limit
GROWTH_PART = 32


def with_growth(size: int) -> int:
    """Returns a budget, or an increase of one, that leaves `size` bytes besides the part for growth."""
    return -(-size * GROWTH_PART // (GROWTH_PART - 1))


def unstorable(config: DiffKVConfig, limit: float) -> ValueError:
    """Returns the error for keys or values that a store cannot hold.

    Args:
        config: configuration of the layers.
        limit: largest magnitude of a stored element.
    """
    rotated = "rotated " if config.rotate else ""
    return ValueError(
        f"{rotated}keys or values are NaN, infinite or beyond {limit:g}, which the cache cannot store; check the "
        "model's dtype (float16 overflows: load it with dtype=torch.bfloat16) or use DiffKVConfig.lossless()."
    )


def no_room(config: DiffKVConfig, needed: int, queries: Tensor | None) -> MemoryError:
    """Returns the error for a budget without room for one page.

    Args:
        config: configuration of the layers.
        needed: smallest budget that holds a page.
        queries: moments of the prompts' queries, which count towards it; None if there are none.
    """
    moments = 0 if queries is None else queries.nbytes
    also, remedy = "", "or lower window, sinks or the batch size."
    if moments > needed - moments:
        # they have the same size in all caches of a model, and are not counted if the model's own were measured
        also, remedy = f", and the moments of queries ({moments} bytes),", "or give adaptive_rounding=False."
    return MemoryError(
        f"max_bytes={config.max_bytes} cannot even hold this cache's windows and tables{also} and one page of tokens "
        f"({needed} bytes); raise max_bytes, {remedy}"
    )


def changed_mask() -> ValueError:
    """Returns the error for a decode step whose mask does not match the stored tokens."""
    return ValueError(
        "the attention mask of a single-token step hides tokens that are stored, or shows some that are not. On this "
        "device, tokens can be hidden only in a forward of several tokens; everything generated since then is wrong. "
        "Call cache.reset() and start over."
    )


def too_few_pages() -> RuntimeError:
    """Returns the error for a compaction without enough free pages."""
    return RuntimeError("a compaction found too few pages, which the host should have provided; please report it.")
