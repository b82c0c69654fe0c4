"""Copies tensors from a device to the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def read_together(*tensors: Tensor) -> list[np.ndarray]:
    """Copies integer and bool tensors from one device to the host at once, as int64 arrays of the same shapes."""
    seen = torch.cat([tensor.reshape(-1).long() for tensor in tensors]).cpu().numpy()
    pieces = np.split(seen, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, tensors)]
