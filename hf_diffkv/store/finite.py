"""Whether keys and values can be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.quantize import compute_dtype
from ..ops.rotation import tokens_at_once

if TYPE_CHECKING:
    from .state import Store


def check_finite(store: Store, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
    """Raises `ValueError` unless all real keys and values, [batch, heads, tokens, dim], can be stored."""
    for tensor in (key, value):
        peaks = [_peak(store, part) for part in tensor.split(tokens_at_once(tensor), dim=2)]
        peak = torch.cat(peaks, dim=1)
        peak = peak if valid is None else torch.where(valid, peak, 0)
        if not bool((peak <= store.value_limit).all()):
            raise ValueError(store.value_message())


def _peak(store: Store, tensor: Tensor) -> Tensor:
    """The largest that an element of each token [batch, heads, tokens, dim] may be in the store, [batch, tokens]."""
    if store.config.rotate:
        # no element is larger than that, however a token is rotated
        return torch.linalg.vector_norm(tensor, dim=3, dtype=compute_dtype(tensor.dtype)).amax(1)
    return tensor.abs().amax((1, 3))
