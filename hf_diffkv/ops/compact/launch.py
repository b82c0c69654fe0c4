"""Launcher of the compaction kernels: at most four launches for any load, without reading the device."""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from ...pages import LayerRows, PageLayout
from ..backend import launch, row_arguments
from ..quantize.launch import TRITON_DTYPES, check_dtype
from ..rounding import ModelFeedback
from ..tiles import Bounds
from .kernels import assign_pages_kernel, find_victims_kernel, plan_rows_kernel, tile_pages
from .move_kernel import move_tokens_kernel
from .reference import candidates

SEARCH_TOKENS = 1024  # tokens that a program of the victim search reads at a time
SEARCH_PROGRAMS = 4096  # long rows are split until about this many programs run
PLAN_ROWS = 256
TOTALS_CHUNK = 256
MOVE_ELEMENTS = 256  # elements in a tile of moved tokens, which one warp handles without spills or exchange


def compact_windows(
    rows: LayerRows,
    window: int,
    high_threshold: Tensor,
    low_threshold: Tensor | None,
    *,
    bounds: Bounds,
    flag: Tensor,
    feedback: ModelFeedback | None = None,
) -> None:
    """Compacts all rows once; arguments as in the reference. The bounds only balance the work."""
    check_dtype(rows.dtype)
    layout, count, device = rows.layout, rows.count, rows.device
    if count == 0:
        return
    leaving = rows.length - rows.window_start > window
    candidate = candidates(rows, leaving)
    blocks = triton.cdiv(count, PLAN_ROWS)
    splits, split_pages = _splits(layout, count, bounds.max_tokens) if layout.selects else (0, 0)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    victims = (None, None, None)
    if layout.selects:
        victims = (scratch(splits, count, dtype=torch.float32), *scratch(2, splits, count))
    given = {
        **row_arguments(rows),
        **candidate._asdict(),
        "leaving": candidate.leaving.view(torch.uint8),
        "key_stride": candidate.key.stride(0),
        "value_stride": candidate.value.stride(0),
        "high_threshold": high_threshold.contiguous(),
        "low_threshold": None if low_threshold is None else low_threshold.contiguous(),
        **dict(zip(("victim_mean", "victim_position", "victim_index"), victims)),
        "splits": splits,
        "split_pages": split_pages,
        "plan": scratch(4, count),
        "totals": scratch(3, blocks),
        "taken": scratch(1),
        "flag": flag,
        **_given(feedback, rows),
        "HIGH_CAPACITY": layout.high.capacity,
        "LOW_CAPACITY": layout.low.capacity,
        "ONE_TIER": layout.one_tier,
        "DTYPE": TRITON_DTYPES[rows.dtype],
    }
    run = partial(launch, device=device, given=given)
    if layout.selects:
        run(find_victims_kernel, (count, splits), TOKENS=SEARCH_TOKENS, num_warps=4)
    run(plan_rows_kernel, (blocks,), BLOCK=PLAN_ROWS, num_warps=4)
    run(assign_pages_kernel, (blocks,), BLOCK=PLAN_ROWS, CHUNK=TOTALS_CHUNK, num_warps=4)
    move_rows = max(1, MOVE_ELEMENTS // triton.next_power_of_2(max(layout.high.key_dim, layout.high.value_dim)))
    run(move_tokens_kernel, (triton.cdiv(count, move_rows),), BLOCK=move_rows, num_warps=1)
    rows.window_start.add_(leaving)


def _given(feedback: ModelFeedback | None, rows: LayerRows) -> dict[str, object]:
    """Returns the feedback as kernel arguments."""
    if feedback is None:
        return {"feedback": None, "layer": None, "head": None, "layer_rows": 1, "model_heads": 1}
    sizes = {"layer_rows": rows.count // feedback.layer.numel(), "model_heads": feedback.matrix.shape[1]}
    return {"feedback": feedback.matrix, "layer": feedback.layer, "head": feedback.head, **sizes}


def _splits(layout: PageLayout, rows: int, max_tokens: int) -> tuple[int, int]:
    """Returns the number of search splits per row, and the pages per split."""
    most = triton.cdiv(max(max_tokens, 1), min(layout.high.capacity, layout.low.capacity))
    tile = max(tile_pages(tier.capacity, SEARCH_TOKENS) for tier in (layout.high, layout.low))
    tiles = triton.cdiv(most, tile)
    splits = max(1, min(tiles, SEARCH_PROGRAMS // rows))
    split_pages = triton.cdiv(tiles, splits) * tile
    return triton.cdiv(most, split_pages), split_pages
