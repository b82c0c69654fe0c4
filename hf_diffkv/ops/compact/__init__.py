"""Parallel KV compaction: tokens change level, pages are taken and given back, over all rows at once."""

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
    """Arguments as in `reference.compact_step`, except for:

    Args:
        bounds: what the host knows of the rows' lengths.
        flag: int32 [1] on the device, errors are added to it and none is cleared. Bit 1: fewer pages were free than
            needed; bit 2: the two ends of a row of the table would have met. The round was called off then: the
            candidates are not stored, and nothing but the windows' start has changed. The reference leaves it alone.

    Raises:
        CorruptMemoryError: by native code, a table entry that is no page, or counts that do not fit the table; nothing
            has changed.
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
