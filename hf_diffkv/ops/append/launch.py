"""Launcher of the append kernel."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pages import LayerRows
from ..backend import device_of, unit_stride
from ..quantize.launch import check_dtype, dot_dtype
from ..rotation import NO_ROTATION, Rotation
from ..rotation_kernel import INNER, root, rotate
from .kernels import append_kernel
from .reference import stored_form

# key (or value) elements that a program, and each of its warps, processes at once
PROGRAM_ELEMENTS = 4096
WARP_ELEMENTS = 512
MOST_WARPS = 8
# the loop over heads usually runs once, so no later iteration is prefetched into shared memory
NUM_STAGES = 1
# widest head that a program rotates without spilling, on AMD devices too; wider ones need separate launches
WIDEST_ROTATED = 256


def append_token(
    rows: LayerRows,
    key: Tensor,
    value: Tensor,
    *,
    limit: float,
    valid: Tensor | None = None,
    query: Tensor | None = None,
    rotation: Rotation = NO_ROTATION,
) -> Tensor | None:
    """Appends one token per request, usually in one launch; arguments and result as in the reference."""
    check_dtype(key.dtype)
    rows.check_tokens(key, value)
    heads, high = rows.heads, rows.layout.high
    rotates = rotation.key is not None and max(high.key_dim, high.value_dim) <= WIDEST_ROTATED
    if not rotates:
        key, value, held_query = stored_form(rotate, rows, key, value, query, rotation)
        query, rotation = None, NO_ROTATION
    else:
        held_query = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if rows.batch == 0:
        return held_query
    key, value = unit_stride(key), unit_stride(value)
    constants, warps = _tile(heads, high.key_dim, high.value_dim, key if rotates else None)
    query_heads, query_strides = 0, (0, 0)
    if query is not None:
        query = unit_stride(query)
        query_heads, query_strides = query.shape[1], query.stride()[:2]
    flags = None if valid is None else valid.to(torch.bool).contiguous().view(torch.uint8)
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
        append_kernel[(rows.batch, 1 + triton.cdiv(query_heads, constants["HEADS"]))](
            rows.window_key,
            rows.window_value,
            rows.window_score,
            rows.length,
            rows.invalid.view(torch.uint8),
            key,
            value,
            flags,
            rows.sink_end,
            query,
            held_query,
            rotation.key,
            rotation.value,
            rows.offset,
            limit,
            rows.slots,
            rows.sink_slots,
            heads,
            query_heads,
            *key.stride()[:2],
            *value.stride()[:2],
            *query_strides,
            **constants,
            num_warps=warps,
            num_stages=NUM_STAGES,
        )
    return held_query


def _tile(heads: int, key_dim: int, value_dim: int, rotated: Tensor | None) -> tuple[dict[str, object], int]:
    """Returns the compile-time arguments and the number of warps; `rotated` is a tensor to rotate, or None."""
    key_width, value_width = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    widest = max(key_width, value_width)
    at_once = max(1, min(triton.next_power_of_2(heads), PROGRAM_ELEMENTS // widest))
    operand = tl.float32
    if rotated is not None:
        # minimum size of a matrix product
        at_once = 16
        operand = dot_dtype(rotated.dtype, device_of(rotated.device).target)
    constants = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_WIDTH": key_width,
        "VALUE_WIDTH": value_width,
        "KEY_ROOT": root(key_dim),
        "VALUE_ROOT": root(value_dim),
        "INNER": INNER,
        "OPERAND": operand,
        "HEADS": at_once,
    }
    return constants, max(1, min(MOST_WARPS, at_once * widest // WARP_ELEMENTS))
