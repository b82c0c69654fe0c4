"""Appends tokens in native code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...native.library import StepBlock, address, call, step_block
from ...pages import LayerRows
from ..backend import unit_stride
from ..rotation import Rotation, rotate
from .reference import rotated


def append_token(rows: LayerRows, key: Tensor, value: Tensor, *, limit: float, valid: Tensor | None = None) -> None:
    """Appends one token per request; arguments as in the reference."""
    rows.check_tokens(key, value)
    block = step_block(rows)
    block.limit = limit
    key, value = set_token(block, key, value)
    valid = None if valid is None else valid.to(torch.bool).contiguous()
    block.valid = address(valid)
    call("step", block)


def append_rotated(
    rows: LayerRows, key: Tensor, value: Tensor, query: Tensor | None, rotation: Rotation, **options: Any
) -> Tensor | None:
    """Rotates keys and values and appends them; arguments and result as in the reference."""
    append_token(rows, *rotated(rows, key, value, rotation), **options)
    return None if query is None else rotate(query[:, :, None], rotation.key)[:, :, 0]


def set_token(block: StepBlock, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Sets the token that the block appends.

    Args:
        key, value: [batch, heads, dim] or [batch, heads, 1, dim].

    Returns:
        Tensors that must be kept alive until the block has run.
    """
    key, value = unit_stride(key), unit_stride(value)
    block.key, block.value = key.data_ptr(), value.data_ptr()
    block.key_batch, block.key_head = key.stride()[:2]
    block.value_batch, block.value_head = value.stride()[:2]
    return key, value
