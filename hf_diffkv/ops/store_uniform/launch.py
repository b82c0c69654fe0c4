"""Launcher of the kernels by which many new tokens enter rows: at most six launches, no read of the device."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...pages import FreeList, PageLayout
from ..backend import device_of
from ..quantize.contents import check_pages
from ..quantize.launch import TRITON_DTYPES, check_dtype, dot_dtype, unit_stride
from ..rotation_kernel import INNER, NUM_WARPS, block_tokens, root
from .kernels import advance_kernel, take_pages_kernel
from .rows import EnteredRows
from .token_kernels import enter_kernel, fix_offsets_kernel, leave_window_kernel, sum_keys_kernel

ROWS_CHUNK = 256
SUM_TOKENS, SUM_STEPS = 32, 16
# of a tile of keys that is rounded, which takes more registers; so it is of fewer tokens, too
ROUNDING_WARPS = 8


def enter_tokens(
    rows: EnteredRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    key: Tensor,
    value: Tensor,
    *,
    rank: Tensor | None,
    count: Tensor | None,
    window: int,
    limit: float,
    key_rotation: Tensor | None,
    value_rotation: Tensor | None,
    centers: bool,
    holds: bool,
    feedback: Tensor | None,
) -> None:
    """Arguments as in the op."""
    check_dtype(key.dtype)
    check_pages(pages, layout.high)
    rows.check(key, value)
    batch, heads, tokens, _ = key.shape
    tier = layout.high
    key, value = unit_stride(key), unit_stride(value)
    if tokens == 0 or batch * heads == 0:
        return
    sizes = {"heads": heads, "tokens": tokens, "window": window}
    state = {"count": count, "length": rows.length, "window_start": rows.window_start, "sink_end": rows.sink_end}
    slots = {"slots": rows.window_key.shape[2], "sink_slots": rows.sink_slots}
    lists = {"state": free_list.state, "high_count": rows.high_count, "rows": batch * heads}
    counting = {"PAGE_TOKENS": tier.capacity, "CHUNK": ROWS_CHUNK, "num_warps": NUM_WARPS}
    width = rows.page_table.shape[2]
    tiles = {
        "TIER": tier,
        "DTYPE": TRITON_DTYPES[key.dtype],
        "num_warps": NUM_WARPS if feedback is None else ROUNDING_WARPS,
    }
    widest = max(tier.key_dim, tier.value_dim)
    block = block_tokens(widest) if feedback is None else few_tokens(widest)
    shift = torch.empty_like(rows.key_offset) if centers else None
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        if centers:
            fix_offsets(rows, key, key_rotation, rank, shift, sizes | state | slots)
        take_pages_kernel[(batch * heads,)](
            ring=free_list.ring, table=rows.page_table, width=width, **lists, **state, **sizes, **counting
        )
        if holds:
            leave_window_kernel[(batch * heads, triton.cdiv(slots["slots"], block))](
                pages,
                rows.page_table,
                rows.window_key,
                rows.window_value,
                shift=shift,
                feedback=feedback,
                width=width,
                BLOCK=block,
                **state,
                **sizes,
                **slots,
                **tiles,
            )
        enter_kernel[(batch * heads, triton.cdiv(tokens, block))](
            pages,
            rows.page_table,
            rows.window_key,
            rows.window_value,
            rows.window_score,
            invalid=rows.invalid.view(torch.uint8),
            key=key,
            value=value,
            rank=rank,
            key_matrix=key_rotation,
            value_matrix=value_rotation,
            offset=rows.key_offset if rows.key_offset.shape[2] else None,
            feedback=feedback,
            limit=limit,
            width=width,
            **strides("key", key),
            **strides("value", value),
            KEY_ROOT=root(tier.key_dim),
            VALUE_ROOT=root(tier.value_dim),
            INNER=INNER,
            OPERAND=dot_dtype(key.dtype, device_of(pages.device).target),
            BLOCK=block,
            **state,
            **sizes,
            **slots,
            **tiles,
        )
        advance_kernel[(1,)](batch=batch, **lists, **state, **sizes, **counting)


def fix_offsets(
    rows: EnteredRows, key: Tensor, matrix: Tensor | None, rank: Tensor | None, shift: Tensor, state: dict[str, object]
) -> None:
    """Fixes the offsets of rows whose first token leaves the window; `shift` becomes what they grow by."""
    batch, heads, tokens, dim = key.shape
    parts = triton.cdiv(tokens, SUM_TOKENS * SUM_STEPS)
    sums = torch.empty(batch * heads, parts, dim, dtype=torch.float32, device=key.device)
    lanes = {"DIM": dim, "LANES": triton.next_power_of_2(dim), "num_warps": NUM_WARPS}
    sum_keys_kernel[(batch * heads, parts)](
        key, rank, sums, heads, tokens, parts, *key.stride()[:3], BLOCK=SUM_TOKENS, STEPS=SUM_STEPS, **lanes
    )
    fix_offsets_kernel[(batch * heads,)](
        sums, matrix, rows.window_key, rows.key_offset, shift, parts=parts, INNER=INNER, **state, **lanes
    )


def few_tokens(widest: int) -> int:
    """Tokens of a tile of `widest` channels that takes more registers, as it is rounded for queries or of two tiers."""
    return max(16, block_tokens(widest) // 2)


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"{name}_{part}": tensor.stride(index) for index, part in enumerate(("batch", "head", "token"))}
