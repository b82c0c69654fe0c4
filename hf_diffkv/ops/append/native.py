"""Appends tokens in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.library import address, call, set_token, step_block
from ...pages import LayerRows
from ..rotation import NO_ROTATION, Rotation, rotate
from .reference import stored_form


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
    """Appends one token per request; arguments and result as in the reference."""
    rows.check_tokens(key, value)
    key, value, query = stored_form(rotate, rows, key, value, query, rotation)
    block = step_block(rows)
    block.limit = limit
    key, value = set_token(block, key, value)
    valid = None if valid is None else valid.to(torch.bool).contiguous()
    block.valid = address(valid)
    call("step", block)
    return query
