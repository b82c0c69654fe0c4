"""Parallel KV compaction: changes tokens' levels, takes and frees pages, for all rows at once."""

from __future__ import annotations

from torch import Tensor

from ...pages import LayerRows
from ..backend import KERNELS, NATIVE, choose, without_autocast
from ..rounding import ModelFeedback
from ..tiles import Bounds
from . import native, reference
from .rewrite import Given, NewTokens, StoredTokens, rewrite_rows, stored_tokens, token_positions

__all__ = [
    "Given",
    "NewTokens",
    "StoredTokens",
    "compact_step",
    "rewrite_rows",
    "stored_tokens",
    "token_positions",
]


@without_autocast
def compact_step(
    rows: LayerRows,
    leaving: Tensor,
    high_threshold: Tensor,
    low_threshold: Tensor | None,
    *,
    bounds: Bounds,
    flag: Tensor,
    feedback: ModelFeedback | None = None,
) -> None:
    """Compacts all rows once; further arguments as in `reference.compact_step`.

    Args:
        bounds: the host's upper bounds on the rows' lengths.
        flag: error bits on the device, int32 [1]; bits are set and never cleared. Bit 1: too few pages were free.
            Bit 2: the two ends of a table row would have met. In both cases the compaction was cancelled: the
            candidates are not stored, and only the windows' start has changed. The reference does not use it.

    Raises:
        CorruptMemoryError: native code found a table entry that is not a page, or counts that do not fit the table;
            nothing has changed.
    """
    backend = choose(rows.device, rows.dtype, *rows.tiers)
    given = (rows, leaving, high_threshold, low_threshold)
    if backend == NATIVE:
        native.compact_step(*given, flag=flag, feedback=feedback)
    elif backend == KERNELS:
        from . import launch

        launch.compact_step(*given, max_tokens=bounds.max_tokens, flag=flag, feedback=feedback)
    else:
        reference.compact_step(*given, tiles=bounds.tiles, feedback=feedback)
