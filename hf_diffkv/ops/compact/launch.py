"""Launcher of the compaction kernels: at most four launches, no read of the device, whatever the load."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...pages import FreeList, PageLayout
from ..quantize.contents import check_pages
from ..quantize.launch import TRITON_DTYPES, check_dtype, unit_stride
from .kernels import assign_pages_kernel, find_victims_kernel, plan_rows_kernel, tile_pages
from .move_kernel import move_tokens_kernel

SEARCH_TOKENS = 1024  # tokens a program of the victim search looks at in one go
SEARCH_PROGRAMS = 4096  # long rows are split until about so many programs run
PLAN_ROWS = 256
TOTALS_CHUNK = 256
MOVE_ELEMENTS = 256  # of a tile of moved tokens, for one warp: no exchange between warps, and no spills


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
    max_tokens: int,
    flag: Tensor | None = None,
) -> Tensor:
    """One round of Algorithm 1 for all rows; arguments and result are those of the reference, except for:

    Args:
        max_tokens: upper bound, known to the host, of the tokens of any row in one tier. It only balances the work.
        flag: int32 [1] on the device, errors are added to it and none is cleared; None makes a new one.

    Returns:
        `flag`. Bit 1: fewer pages were free than needed; bit 2: the two ends of a row of the table would have met. The
        round was called off then: the candidates are not stored and nothing else has changed.
    """
    check_pages(pages, layout.high)
    check_dtype(key.dtype)
    _check_rows(page_table, high_count, low_count, key, value, score, position, leaving, length)
    rows, width = page_table.shape
    device = pages.device
    if flag is None:
        flag = torch.zeros(1, dtype=torch.int32, device=device)
    if rows == 0:
        return flag
    key, value = unit_stride(key), unit_stride(value)
    score, position, length = score.contiguous(), position.contiguous(), length.contiguous()
    thresholds = [None if each is None else each.contiguous() for each in (high_threshold, low_threshold)]
    leaving = leaving.contiguous().view(torch.uint8)

    splits, split_pages = _splits(layout, rows, max_tokens) if layout.selects else (0, 0)
    blocks = triton.cdiv(rows, PLAN_ROWS)
    victims = (None, None, None)
    if layout.selects:
        mean = torch.empty(splits, rows, dtype=torch.float32, device=device)
        victims = (mean, *torch.empty(2, splits, rows, dtype=torch.int32, device=device))
    plan = torch.empty(4, rows, dtype=torch.int32, device=device)
    totals = torch.empty(3, blocks, dtype=torch.int32, device=device)
    taken = torch.empty(1, dtype=torch.int32, device=device)

    move_rows = max(1, MOVE_ELEMENTS // triton.next_power_of_2(max(layout.high.key_dim, layout.high.value_dim)))
    candidates = (score, position, leaving, length, *thresholds)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if layout.selects:
            find_victims_kernel[(rows, splits)](
                pages,
                page_table,
                high_count,
                low_count,
                *candidates,
                *victims,
                rows,
                width,
                splits,
                split_pages,
                HIGH=layout.high,
                LOW=layout.low,
                TOKENS=SEARCH_TOKENS,
                num_warps=4,
            )
        plan_rows_kernel[(blocks,)](
            high_count,
            low_count,
            *candidates,
            *victims,
            plan,
            totals,
            rows,
            width,
            splits,
            **_plan_constants(layout),
            num_warps=4,
        )
        assign_pages_kernel[(blocks,)](
            free_list.ring,
            free_list.state,
            page_table,
            high_count,
            low_count,
            plan,
            totals,
            taken,
            flag,
            rows,
            width,
            **_plan_constants(layout),
            CHUNK=TOTALS_CHUNK,
            num_warps=4,
        )
        move_tokens_kernel[(triton.cdiv(rows, move_rows),)](
            pages,
            free_list.state,
            page_table,
            key,
            value,
            score,
            position,
            plan,
            taken,
            rows,
            width,
            key.stride(0),
            value.stride(0),
            HIGH=layout.high,
            LOW=layout.low,
            DTYPE=TRITON_DTYPES[key.dtype],
            BLOCK=move_rows,
            num_warps=1,
        )
    return flag


def _check_rows(
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    position: Tensor,
    leaving: Tensor,
    length: Tensor,
) -> None:
    rows = page_table.shape[0]
    for name, tensor in (("page_table", page_table), ("high_count", high_count), ("low_count", low_count)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.shape[0] != rows:
            raise ValueError(f"{name} must be contiguous int32 with {rows} rows, as it is written in place.")
    for name, tensor, dtype in (
        ("score", score, torch.float32),
        ("position", position, torch.int64),
        ("leaving", leaving, torch.bool),
        ("length", length, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.shape != (rows,):
            raise ValueError(f"{name} must be {dtype} [{rows}], not {tensor.dtype} {tuple(tensor.shape)}.")
    if key.shape[0] != rows or value.shape[0] != rows or key.dtype != value.dtype:
        raise ValueError(f"key and value must have {rows} rows and the same dtype.")


def _splits(layout: PageLayout, rows: int, max_tokens: int) -> tuple[int, int]:
    """Pieces that each row is searched in, and pages per piece."""
    most = triton.cdiv(max(max_tokens, 1), min(layout.high.capacity, layout.low.capacity))
    tile = max(tile_pages(tier.capacity, SEARCH_TOKENS) for tier in (layout.high, layout.low))
    tiles = triton.cdiv(most, tile)
    splits = max(1, min(tiles, SEARCH_PROGRAMS // rows))
    split_pages = triton.cdiv(tiles, splits) * tile
    return triton.cdiv(most, split_pages), split_pages


def _plan_constants(layout: PageLayout) -> dict[str, int]:
    return {"HIGH_CAPACITY": layout.high.capacity, "LOW_CAPACITY": layout.low.capacity, "BLOCK": PLAN_ROWS}
