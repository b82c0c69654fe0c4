"""The newest token of every request enters the window."""

from __future__ import annotations

from torch import Tensor

from ..backend import KERNELS, NATIVE, choose, use_kernels, without_autocast
from ..rotation import rotate
from . import native, reference

__all__ = ["append_rotated", "append_token"]

# heads that a program rotates without spilling, on AMD devices too; wider ones take launches of their own
WIDEST_ROTATED = 256


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
    """Arguments as in `reference.append_token`."""
    backend = choose(key.device, key.dtype)
    implementation = native if backend == NATIVE else reference
    if backend == KERNELS:
        from . import launch as implementation
    options = {"limit": limit, "valid": valid, "sink_end": sink_end, "sink_slots": sink_slots}
    implementation.append_token(window_key, window_value, window_score, length, invalid, key, value, **options)


@without_autocast
def append_rotated(
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    length: Tensor,
    invalid: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor | None,
    *,
    key_rotation: Tensor,
    value_rotation: Tensor,
    offset: Tensor | None,
    **options: object,
) -> Tensor | None:
    """`append_token` of rotated keys and values, keys less an offset; with kernels in the same launch, as a rule.

    Args:
        query: [batch, query_heads, key_dim], rotated as keys are, or None.
        key_rotation, value_rotation, offset: as `rotation.rotate` takes them.
        others: as in `append_token`.

    Returns:
        `query` rotated, or None.
    """
    window = (window_key, window_value, window_score, length, invalid)
    if use_kernels(key.device, key.dtype) and max(key.shape[2], value.shape[2]) <= WIDEST_ROTATED:
        from . import launch

        rotation = launch.Rotation(key_rotation, value_rotation, offset)
        return launch.append_token(*window, key, value, query=query, rotation=rotation, **options)
    key = rotate(key[:, :, None], key_rotation, offset)[:, :, 0]
    value = rotate(value[:, :, None], value_rotation)[:, :, 0]
    append_token(*window, key, value, **options)
    return None if query is None else rotate(query[:, :, None], key_rotation)[:, :, 0]
