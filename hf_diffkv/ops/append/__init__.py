"""Appends the newest token of every request to its window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...pages import LayerRows
from ..backend import KERNELS, NATIVE, choose, use_kernels, without_autocast
from ..rotation import Rotation, rotate
from . import native, reference

__all__ = ["append_rotated", "append_token"]

# widest head that a program rotates without spilling, on AMD devices too; wider ones need launches of their own
WIDEST_ROTATED = 256


def append_token(rows: LayerRows, key: Tensor, value: Tensor, *, limit: float, valid: Tensor | None = None) -> None:
    """Appends one token per request to the window; arguments as in `reference.append_token`."""
    backend = choose(key.device, key.dtype, rows.layout.high, rows.layout.low)
    implementation = native if backend == NATIVE else reference
    if backend == KERNELS:
        from . import launch as implementation
    implementation.append_token(rows, key, value, limit=limit, valid=valid)


@without_autocast
def append_rotated(
    rows: LayerRows, key: Tensor, value: Tensor, query: Tensor | None, rotation: Rotation, **options: Any
) -> Tensor | None:
    """Rotates keys and values, subtracts the rows' offset from keys, and appends them; usually one kernel launch.

    Args:
        query: query states to rotate like keys, [batch, query_heads, key_dim], or None.
        rotation: rotations of keys and values.
        **options: further arguments of `append_token`.

    Returns:
        The rotated query, or None.
    """
    if use_kernels(key.device, key.dtype) and max(key.shape[2], value.shape[2]) <= WIDEST_ROTATED:
        from . import launch

        return launch.append_token(rows, key, value, query=query, rotation=rotation, **options)
    key = rotate(key[:, :, None], rotation.key, rows.offset)[:, :, 0]
    value = rotate(value[:, :, None], rotation.value)[:, :, 0]
    append_token(rows, key, value, **options)
    return None if query is None else rotate(query[:, :, None], rotation.key)[:, :, 0]
