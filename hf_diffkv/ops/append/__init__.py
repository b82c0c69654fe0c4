"""The newest token of every request enters the window."""

from __future__ import annotations

from torch import Tensor

from ..backend import KERNELS, NATIVE, choose
from . import native, reference

__all__ = ["append_token"]


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
