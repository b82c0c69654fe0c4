"""Launcher of the compaction kernels: at most four launches, no read of the device, whatever the load."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...pages import LayerRows, PageLayout
from ..quantize.launch import TRITON_DTYPES, check_dtype
from ..rounding import ModelFeedback
from .candidates import Candidates, candidates
from .kernels import assign_pages_kernel, find_victims_kernel, plan_rows_kernel, tile_pages
from .move_kernel import move_tokens_kernel

SEARCH_TOKENS = 1024  # tokens a program of the victim search looks at in one go
SEARCH_PROGRAMS = 4096  # long rows are split until about so many programs run
PLAN_ROWS = 256
TOTALS_CHUNK = 256
MOVE_ELEMENTS = 256  # of a tile of moved tokens, for one warp: no exchange between warps, and no spills


def compact_step(
    rows: LayerRows,
    leaving: Tensor,
    high_threshold: Tensor,
    low_threshold: Tensor | None,
    *,
    max_tokens: int,
    flag: Tensor,
    feedback: ModelFeedback | None = None,
) -> None:
    """One round of Algorithm 1 for all rows; arguments are those of the reference, except for:

    Args:
        max_tokens: upper bound, known to the host, of the tokens of any row in one tier. It only balances the work.
        flag: int32 [1] on the device, errors are added to it and none is cleared. Bit 1: fewer pages were free than
            needed; bit 2: the two ends of a row of the table would have met. The round was called off then: the
            candidates are not stored, and nothing but the windows' start has changed.
    """
    check_dtype(rows.dtype)
    if rows.count:
        _move(rows, candidates(rows, leaving), (high_threshold, low_threshold), max_tokens, flag, feedback)
    rows.window_start.add_(leaving)


def _move(
    rows: LayerRows,
    candidate: Candidates,
    given: tuple[Tensor | None, Tensor | None],
    max_tokens: int,
    flag: Tensor,
    feedback: ModelFeedback | None,
) -> None:
    key, value, score, position, leaving, length = candidate
    leaving = leaving.view(torch.uint8)
    pages, layout, free_list, device = rows.pages, rows.layout, rows.free_list, rows.device
    thresholds = [None if each is None else each.reshape(-1).contiguous() for each in given]
    given_feedback = _given(feedback, rows)
    page_table, (high_count, low_count), width, rows = rows.page_table, rows.counts, rows.width, rows.count

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
            ONE_TIER=layout.one_tier,
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
            **given_feedback,
            HIGH=layout.high,
            LOW=layout.low,
            DTYPE=TRITON_DTYPES[key.dtype],
            BLOCK=move_rows,
            ONE_TIER=layout.one_tier,
            num_warps=1,
        )


def _given(feedback: ModelFeedback | None, rows: LayerRows) -> dict[str, object]:
    """Feedback as the kernel takes it."""
    if feedback is None:
        nothing = {"feedback": None, "layer": None, "head": None}
        return {**nothing, "layer_rows": 1, "heads": 1, "model_heads": 1}
    sizes = {"layer_rows": rows.count // feedback.layer.numel(), "heads": rows.heads}
    tensors = {"feedback": feedback.matrix, "layer": feedback.layer, "head": feedback.head}
    return {**tensors, **sizes, "model_heads": feedback.matrix.shape[1]}


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
