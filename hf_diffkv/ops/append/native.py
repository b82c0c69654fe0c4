"""Appending in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.library import address, call, with_rows
from ...native.structs import DTYPES, Step


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
    block = Step(batch=batch, heads=heads, slots=slots, sink_slots=sink_slots, limit=limit)
    block.sink_end = address(sink_end)
    block.format.dtype = DTYPES[key.dtype]
    block.format.tier[0].key.dim, block.format.tier[0].value.dim = key_dim, value_dim
    block.window_key, block.window_value = address(window_key), address(window_value)
    block.window_score, block.length, block.invalid = address(window_score), address(length), address(invalid)
    key, value = set_token(block, key, value)
    valid = None if valid is None else valid.to(torch.bool).contiguous()
    block.valid = address(valid)
    call("step", block)


def set_token(block: Step, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Has the block append key and value, [batch, heads, dim] or [batch, heads, 1, dim].

    Returns what must live until it has run.
    """
    key, key_strides = with_rows(key)
    value, value_strides = with_rows(value)
    block.key, block.value = key.data_ptr(), value.data_ptr()
    block.key_batch, block.key_head = key_strides[:2]
    block.value_batch, block.value_head = value_strides[:2]
    return key, value
