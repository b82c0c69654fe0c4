"""Parallel KV compaction: tokens change level, pages are taken and given back, over all rows at once."""

from __future__ import annotations

from torch import Tensor

from ...pages import FreeList, PageLayout
from ..backend import KERNELS, NATIVE, choose, without_autocast
from ..tiles import Bounds
from . import native, reference
from .reference import least_mean
from .rewrite import StoredTokens, rewrite_rows, stored_tokens, token_positions
from .tokens import Given, NewTokens

__all__ = [
    "Given",
    "NewTokens",
    "StoredTokens",
    "compact_step",
    "least_mean",
    "rewrite_rows",
    "stored_tokens",
    "token_positions",
]


@without_autocast
def compact_step(
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    position: Tensor,
    leaving: Tensor,
    length: Tensor,
    high_threshold: Tensor | None,
    low_threshold: Tensor | None,
    *,
    bounds: Bounds,
    flag: Tensor,
) -> None:
    """Arguments as in `reference.compact_step`, except for:

    Args:
        bounds: what the host knows of the rows' lengths.
        flag: int32 [1] on the device; becomes non-zero if the round had to be called off.
    """
    rows = (page_table, high_count, low_count, key, value, score, position, leaving, length)
    backend = choose(pages.device, key.dtype, layout.high, layout.low)
    if backend == NATIVE:
        native.compact_step(pages, layout, free_list, *rows, high_threshold, low_threshold, flag=flag)
    elif backend == KERNELS:
        from . import launch

        launch.compact_step(
            pages,
            layout,
            free_list,
            *rows,
            high_threshold,
            low_threshold,
            max_tokens=bounds.max_tokens,
            flag=flag,
        )
    else:
        reference.compact_step(pages, layout, free_list, *rows, high_threshold, low_threshold, tiles=bounds.tiles)
