"""Launcher of the append kernel."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ..quantize.launch import check_dtype, unit_stride
from ..variant import KernelVariant
from .kernels import append_kernel

# of the keys, or the values, that a program and a warp of it take at once
TILE_ELEMENTS = 4096
WARP_ELEMENTS = 512


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
) -> None:
    """Arguments as in the reference; windows must be contiguous, as they are written in place."""
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
    if batch == 0:
        return
    key, value = unit_stride(key), unit_stride(value)
    constants, warps = _tile(heads, key_dim, value_dim)
    flags = None if valid is None else valid.to(torch.bool).contiguous().view(torch.uint8)
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
        append_kernel[(batch,)](
            window_key,
            window_value,
            window_score,
            length,
            invalid.view(torch.uint8),
            key,
            value,
            flags,
            sink_end,
            limit,
            slots,
            sink_slots,
            heads,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            **constants,
            num_warps=warps,
        )


def _tile(heads: int, key_dim: int, value_dim: int) -> tuple[dict[str, int], int]:
    """Compile-time arguments, and warps."""
    key_width, value_width = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    widest = max(key_width, value_width)
    at_once = max(1, min(triton.next_power_of_2(heads), TILE_ELEMENTS // widest))
    constants = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "KEY_WIDTH": key_width, "VALUE_WIDTH": value_width}
    return constants | {"HEADS": at_once}, max(1, at_once * widest // WARP_ELEMENTS)


def variants() -> list[KernelVariant]:
    """What the ahead-of-time report compiles."""
    signature = {
        **dict.fromkeys(("window_key", "window_value", "key", "value"), "*bf16"),
        "window_score": "*fp32",
        **dict.fromkeys(("length", "sink_end"), "*i64"),
        **dict.fromkeys(("invalid", "valid"), "*u8"),
        "limit": "fp32",
        **dict.fromkeys(("slots", "sink_slots", "heads", "key_batch", "key_head", "value_batch", "value_head"), "i32"),
    }
    found = []
    for heads, dim in ((8, 80), (8, 128), (32, 128), (8, 512)):
        constants, warps = _tile(heads, dim, dim)
        name = f"append-d{dim}" + (f"-h{heads}" if heads != 8 else "")
        found.append(KernelVariant(name, append_kernel, signature, constants, warps))
    return found
