"""Appends tokens in native code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...native.library import address, call, set_token, step_block
from ...pages import LayerRows
from ..backend import without_autocast
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


@without_autocast
def append_rotated(
    rows: LayerRows, key: Tensor, value: Tensor, query: Tensor | None, rotation: Rotation, **options: Any
) -> Tensor | None:
    """Rotates keys and values and appends them; arguments and result as in the reference."""
    append_token(rows, *rotated(rows, key, value, rotation), **options)
    return None if query is None else rotate(query[:, :, None], rotation.key)[:, :, 0]
