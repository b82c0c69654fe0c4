"""Launcher of the kernels that store many new tokens: at most six launches, without reading the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..backend import device_of, launch, row_arguments, unit_stride
from ..prompt_tokens import Placement, PromptTokens
from ..quantize.launch import TRITON_DTYPES, check_dtype, dot_dtype
from ..rotation_kernel import INNER, NUM_WARPS, block_tokens, root
from .kernels import advance_kernel, leave_window_kernel, store_new_kernel, take_pages_kernel
from .offset_kernels import fix_offsets_kernel, sum_keys_kernel

ROWS_CHUNK = 256
SUM_TOKENS, SUM_STEPS = 32, 16
# warps for a tile of keys that is rounded, which takes more registers and therefore has fewer tokens
ROUNDING_WARPS = 8


def store_uniform(rows: LayerRows, new: PromptTokens, placement: Placement, holds: bool) -> None:
    """Appends new tokens to every request, and quantises the tokens that leave the windows.

    Only kernels run; nothing is read from the device.

    Args:
        rows: rows whose pages have no scores and positions, low where `alpha_high` is above 0; the free list must hold
            all pages that they will lack.
        new: new tokens.
        placement: form in which the tokens are stored.
        holds: whether any window holds a token.

    Raises:
        ValueError: the tokens do not fit the rows, or kernels do not support their dtype.
    """
    check_dtype(rows.dtype)
    rows.check_tokens(new.key, new.value)
    tokens, many = new.key.shape[2], rows.count
    layout, feedback, device = rows.layout, placement.feedback, rows.device
    if tokens == 0 or many == 0:
        return
    given = given_arguments(rows, new, placement)
    counting = {
        "HIGH_TOKENS": layout.high.capacity,
        "LOW_TOKENS": layout.low.capacity,
        "CHUNK": ROWS_CHUNK,
        "num_warps": NUM_WARPS,
    }
    widest = max(layout.high.key_dim, layout.high.value_dim)
    block = block_tokens(widest) if feedback is None else few_tokens(widest)
    tiles = {"BLOCK": block, "num_warps": NUM_WARPS if feedback is None else ROUNDING_WARPS}
    shift = fix_offsets(rows, given) if placement.centers else None
    launch(take_pages_kernel, (many,), device, given, **counting)
    if holds:
        launch(leave_window_kernel, (many, triton.cdiv(rows.slots, block)), device, given, shift=shift, **tiles)
    launch(store_new_kernel, (many, triton.cdiv(tokens, block)), device, given, **tiles)
    launch(advance_kernel, (1,), device, given, **counting)


def fix_offsets(rows: LayerRows, given: dict[str, object]) -> Tensor:
    """Fixes the offsets of rows whose first token leaves the window; returns the change, in the offsets' shape.

    Args:
        rows: rows to centre.
        given: result of `given_arguments`.
    """
    device, (*_, tokens, dim) = rows.device, given["key"].shape
    parts = triton.cdiv(tokens, SUM_TOKENS * SUM_STEPS)
    sums = torch.empty(rows.count, parts, dim, dtype=torch.float32, device=device)
    shift = torch.empty_like(rows.key_offset)
    run = partial(launch, device=device, DIM=dim, LANES=triton.next_power_of_2(dim), num_warps=NUM_WARPS)
    given = given | {"sums": sums, "parts": parts, "shift": shift, "matrix": given["key_matrix"]}
    run(sum_keys_kernel, (rows.count, parts), given=given, BLOCK=SUM_TOKENS, STEPS=SUM_STEPS)
    run(fix_offsets_kernel, (rows.count,), given=given)
    return shift


def few_tokens(widest: int) -> int:
    """Returns the tokens of a tile of `widest` channels that needs more registers, for rounding or for two tiers."""
    return max(16, block_tokens(widest) // 2)


def given_arguments(rows: LayerRows, new: PromptTokens, placement: Placement) -> dict[str, object]:
    """Returns the arguments of the kernels that store a prompt, by parameter name."""
    new = replace(new, key=unit_stride(new.key), value=unit_stride(new.value))
    high, one_tier = rows.layout.high, rows.layout.one_tier
    return {
        **row_arguments(rows),
        "alpha_high": None if one_tier else rows.alpha_high,
        "alpha_low": rows.alpha_low,
        "low_count": None if one_tier else rows.low_count,
        "invalid": rows.invalid.view(torch.uint8),
        "offset": rows.offset,
        "key": new.key,
        "value": new.value,
        "rank": new.rank,
        "count": new.count,
        "tokens": new.key.shape[2],
        "window": placement.window,
        "limit": placement.limit,
        "feedback": placement.feedback,
        "key_matrix": placement.key_rotation,
        "value_matrix": placement.value_rotation,
        **_strides("key", new.key),
        **_strides("value", new.value),
        "DTYPE": TRITON_DTYPES[rows.dtype],
        "KEY_ROOT": root(high.key_dim),
        "VALUE_ROOT": root(high.value_dim),
        "INNER": INNER,
        "OPERAND": dot_dtype(rows.dtype, device_of(rows.device).target),
    }


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"{name}_{part}": tensor.stride(index) for index, part in enumerate(("batch", "head", "token"))}
