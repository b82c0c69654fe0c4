"""Appends tokens in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...pages import LayerRows
from ...pages.rows import slots_of
from ..rotation import NO_ROTATION, Rotation, rotate


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
    """Writes one token per request into its window slot, with a sum of zero, and increments the length.

    Keys and values are rotated, and the rows' offset is subtracted from keys.

    Args:
        rows: rows to append to. `invalid` is set if a real token has a key or value that is NaN or beyond `limit`.
        key, value: key and value states of the model, [batch, heads, dim].
        limit: largest magnitude that can be stored.
        valid: True where the token is real, bool [batch]; other requests do not change. None if all are real.
        query: query states to rotate like keys, [batch, query_heads, key_dim], or None.
        rotation: rotations of keys and values.

    Returns:
        The rotated query; None without a query.
    """
    key, value, query = stored_form(rotate, rows, key, value, query, rotation)
    batch = torch.arange(rows.batch, device=rows.device)
    slot = slots_of(rows.length, rows.sink_end, rows.sink_slots, rows.slots)
    finite = (key.abs().amax((1, 2)) <= limit) & (value.abs().amax((1, 2)) <= limit)
    finite = (finite if valid is None else finite | ~valid).all()
    score = torch.zeros((), dtype=torch.float32, device=rows.device)
    if valid is not None:
        key = torch.where(valid[:, None, None], key, rows.window_key[batch, :, slot])
        value = torch.where(valid[:, None, None], value, rows.window_value[batch, :, slot])
        score = torch.where(valid[:, None], score, rows.window_score[batch, :, slot])
    rows.window_key[batch, :, slot] = key
    rows.window_value[batch, :, slot] = value
    rows.window_score[batch, :, slot] = score
    rows.invalid.logical_or_(~finite)
    rows.length.add_(1 if valid is None else valid)
    return query


def stored_form(
    rotate: Callable[..., Tensor],
    rows: LayerRows,
    key: Tensor,
    value: Tensor,
    query: Tensor | None,
    rotation: Rotation,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Converts the states of `append_token` to the store's form; `rotate` is the op of a backend."""
    key = rotate(key[:, :, None], rotation.key, rows.offset)[:, :, 0]
    value = rotate(value[:, :, None], rotation.value)[:, :, 0]
    return key, value, None if query is None else rotate(query[:, :, None], rotation.key)[:, :, 0]
