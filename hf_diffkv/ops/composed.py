"""Ops that are made of other ops, for backends that have no call of their own for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..pages import LayerRows
from .rotation import Rotation
from .softmax import Softmax
from .table import Ops


def compact_windows(
    ops: Ops, rows: LayerRows, window: int, high_threshold: Tensor, low_threshold: Tensor | None, **options: Any
) -> None:
    """Compacts all rows whose windows hold more than `window` tokens; further arguments as in `compact_step`."""
    leaving = rows.length - rows.window_start > window
    ops.compact_step(rows, leaving, high_threshold, low_threshold, **options)


def append_and_attend(
    ops: Ops,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    rotation: Rotation | None,
    limit: float,
    valid: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Appends the newest token of every request and attends from it.

    Args:
        query, key, value: states of the model, [batch, query_heads or heads, 1, dim]; the query may be absorbed.
        rows: rows to append to and attend to.
        softmax: softmax parameters of the layer.
        rotation: rotations of keys and values, or None.
        limit: largest magnitude that can be stored.
        valid, **options: arguments of `decode_attention`.

    Returns:
        Attention output in the model's form, [batch, query_heads, 1, value_dim] in the query's dtype.
    """
    query, key, value = query[:, :, 0], key[:, :, 0], value[:, :, 0]
    if rotation is None:
        key = ops.rotate(key[:, :, None], None, rows.offset)[:, :, 0]
        ops.append_token(rows, key, value, limit=limit, valid=valid)
    elif query.shape[-1] == key.shape[-1]:
        query = ops.append_rotated(rows, key, value, query, rotation, limit=limit, valid=valid)
    else:
        ops.append_rotated(rows, key, value, None, rotation, limit=limit, valid=valid)
        parts = zip(query[None].split([key.shape[-1], value.shape[-1]], dim=-1), (rotation.key, rotation.value))
        query = torch.cat([ops.rotate(part, matrix)[0] for part, matrix in parts], dim=-1)
    output = ops.decode_attention(query, rows, softmax, valid=valid, **options)
    # heads are passed as tokens: tiles of one token each would read the matrix once per tile
    return (output if rotation is None else ops.rotate(output[None], rotation.value.mT)[0])[:, :, None]
