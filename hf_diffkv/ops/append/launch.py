"""Launcher of the append kernel."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import device_of
from ..quantize.launch import check_dtype, dot_dtype, unit_stride
from ..rotation_kernel import INNER, root
from .kernels import append_kernel

# of the keys, or the values, that a program and a warp of it take at once
TILE_ELEMENTS = 4096
WARP_ELEMENTS = 512
MOST_WARPS = 8
# the loop over heads runs once as a rule: nothing of the next round is to wait in shared memory
NUM_STAGES = 1


@dataclass(frozen=True)
class Rotation:
    """Contiguous matrices and offset as `ops.rotation.rotate` takes them."""

    key: Tensor
    value: Tensor
    offset: Tensor | None


def append_token(
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    length: Tensor,
    invalid: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    limit: float,
    valid: Tensor | None = None,
    sink_end: Tensor | None = None,
    sink_slots: int = 0,
    query: Tensor | None = None,
    rotation: Rotation | None = None,
) -> Tensor | None:
    """Arguments as in the reference; windows must be contiguous, as they are written in place.

    Args:
        query: [batch, query_heads, key_dim]; rotated like the keys it is returned, contiguous.
        rotation: of keys and values on their way.
    """
    check_dtype(key.dtype)
    batch, heads, slots, key_dim = window_key.shape
    value_dim = window_value.shape[3]
    for name, tensor, shape in (
        ("key", key, (batch, heads, key_dim)),
        ("value", value, (batch, heads, value_dim)),
        ("window_value", window_value, (batch, heads, slots, value_dim)),
        ("window_score", window_score, (batch, heads, slots)),
        ("length", length, (batch,)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}.")
    if not all(tensor.is_contiguous() for tensor in (window_key, window_value, window_score, length)):
        raise ValueError("windows must be contiguous, as they are written in place.")
    if key.dtype != window_key.dtype or value.dtype != window_value.dtype:
        raise ValueError(f"keys and values must be {window_key.dtype}, not {key.dtype} and {value.dtype}.")
    held_query = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch == 0:
        return held_query
    key, value = unit_stride(key), unit_stride(value)
    constants, warps = _tile(heads, key_dim, value_dim, None if rotation is None else key)
    query_heads, query_strides = 0, (0, 0)
    if query is not None:
        query = unit_stride(query)
        query_heads, query_strides = query.shape[1], query.stride()[:2]
    matrices = (None, None, None) if rotation is None else (rotation.key, rotation.value, rotation.offset)
    flags = None if valid is None else valid.to(torch.bool).contiguous().view(torch.uint8)
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
        append_kernel[(batch, 1 + triton.cdiv(query_heads, constants["HEADS"]))](
            window_key,
            window_value,
            window_score,
            length,
            invalid.view(torch.uint8),
            key,
            value,
            flags,
            sink_end,
            query,
            held_query,
            *matrices,
            limit,
            slots,
            sink_slots,
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
    """Compile-time arguments, and warps; `rotated`: a tensor of those that are."""
    key_width, value_width = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    widest = max(key_width, value_width)
    at_once = max(1, min(triton.next_power_of_2(heads), TILE_ELEMENTS // widest))
    operand = tl.float32
    if rotated is not None:
        # as many as matrix products take
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
