"""Launcher of the kernels by which many new tokens enter rows: at most six launches, no read of the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..backend import device_of
from ..prompt_tokens import Placement, PromptTokens
from ..quantize.launch import TRITON_DTYPES, check_dtype, dot_dtype, unit_stride
from ..rotation_kernel import INNER, NUM_WARPS, block_tokens, root
from .kernels import advance_kernel, leave_window_kernel, store_new_kernel, take_pages_kernel
from .offset_kernels import fix_offsets_kernel, sum_keys_kernel

ROWS_CHUNK = 256
SUM_TOKENS, SUM_STEPS = 32, 16
# of a tile of keys that is rounded, which takes more registers; so it is of fewer tokens, too
ROUNDING_WARPS = 8


def store_uniform(rows: LayerRows, new: PromptTokens, placement: Placement, holds: bool) -> None:
    """Arguments as in the op."""
    check_dtype(rows.dtype)
    rows.check_tokens(new.key, new.value)
    tokens, many = new.key.shape[2], rows.count
    layout, feedback, pages = rows.layout, placement.feedback, rows.pages
    if tokens == 0 or many == 0:
        return
    new = replace(new, key=unit_stride(new.key), value=unit_stride(new.value))
    sizes = {"heads": rows.heads, "tokens": tokens, "window": placement.window}
    state = {"count": new.count, "length": rows.length, "window_start": rows.window_start, "sink_end": rows.sink_end}
    slots = {"slots": rows.slots, "sink_slots": rows.sink_slots}
    alpha_high, low_count = (None, None) if layout.one_tier else (rows.alpha_high, rows.low_count)
    lists = {"state": rows.free_list.state, "high_count": rows.high_count, "low_count": low_count, "rows": many}
    tokens_of_page = {"HIGH_TOKENS": layout.high.capacity, "LOW_TOKENS": layout.low.capacity}
    counting = {"alpha_high": alpha_high, **tokens_of_page, "CHUNK": ROWS_CHUNK, "num_warps": NUM_WARPS}
    tiles = {
        "alpha_high": alpha_high,
        "HIGH": layout.high,
        "LOW": layout.low,
        "DTYPE": TRITON_DTYPES[rows.dtype],
        "num_warps": NUM_WARPS if feedback is None else ROUNDING_WARPS,
    }
    widest = max(layout.high.key_dim, layout.high.value_dim)
    block = block_tokens(widest) if feedback is None else few_tokens(widest)
    shift = None
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        if placement.centers:
            shift = fix_offsets(rows, new, placement, sizes | state | slots)
        take_pages_kernel[(many,)](
            ring=rows.free_list.ring, table=rows.page_table, width=rows.width, **lists, **state, **sizes, **counting
        )
        if holds:
            leave_window_kernel[(many, triton.cdiv(rows.slots, block))](
                pages,
                rows.page_table,
                window_key=rows.window_key,
                window_value=rows.window_value,
                shift=shift,
                feedback=feedback,
                width=rows.width,
                BLOCK=block,
                **state,
                **sizes,
                **slots,
                **tiles,
            )
        store_new_kernel[(many, triton.cdiv(tokens, block))](
            pages,
            rows.page_table,
            window_key=rows.window_key,
            window_value=rows.window_value,
            window_score=rows.window_score,
            width=rows.width,
            BLOCK=block,
            **given_tokens(rows, new, placement),
            **state,
            **sizes,
            **slots,
            **tiles,
        )
        advance_kernel[(1,)](batch=rows.batch, **lists, **state, **sizes, **counting)


def fix_offsets(rows: LayerRows, new: PromptTokens, placement: Placement, state: dict[str, object]) -> Tensor:
    """Fixes the offsets of rows whose first token leaves the window; returns what they have grown by, of their shape.

    Args:
        state: other arguments of `fix_offsets_kernel`: sizes, and where windows start and end.
    """
    key = new.key
    heads, tokens, dim = key.shape[1:]
    parts = triton.cdiv(tokens, SUM_TOKENS * SUM_STEPS)
    sums = torch.empty(rows.count, parts, dim, dtype=torch.float32, device=key.device)
    shift = torch.empty_like(rows.key_offset)
    lanes = {"DIM": dim, "LANES": triton.next_power_of_2(dim), "num_warps": NUM_WARPS}
    sum_keys_kernel[(rows.count, parts)](
        key, new.rank, sums, heads, tokens, parts, *key.stride()[:3], BLOCK=SUM_TOKENS, STEPS=SUM_STEPS, **lanes
    )
    fix_offsets_kernel[(rows.count,)](
        sums,
        placement.key_rotation,
        rows.window_key,
        rows.key_offset,
        shift,
        parts=parts,
        INNER=INNER,
        **state,
        **lanes,
    )
    return shift


def few_tokens(widest: int) -> int:
    """Tokens of a tile of `widest` channels that takes more registers, as it is rounded for queries or of two tiers."""
    return max(16, block_tokens(widest) // 2)


def given_tokens(rows: LayerRows, new: PromptTokens, placement: Placement) -> dict[str, object]:
    """Arguments by which a kernel finds new tokens and brings them into the form of the store."""
    high = rows.layout.high
    return {
        "invalid": rows.invalid.view(torch.uint8),
        "key": new.key,
        "value": new.value,
        "rank": new.rank,
        "key_matrix": placement.key_rotation,
        "value_matrix": placement.value_rotation,
        "offset": rows.offset,
        "feedback": placement.feedback,
        "limit": placement.limit,
        **_strides("key", new.key),
        **_strides("value", new.value),
        "KEY_ROOT": root(high.key_dim),
        "VALUE_ROOT": root(high.value_dim),
        "INNER": INNER,
        "OPERAND": dot_dtype(rows.dtype, device_of(rows.device).target),
    }


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"{name}_{part}": tensor.stride(index) for index, part in enumerate(("batch", "head", "token"))}
