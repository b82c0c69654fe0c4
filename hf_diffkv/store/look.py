"""Reading what stands on a device, and reckoning with it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def read_together(*tensors: Tensor) -> list[np.ndarray]:
    """Integers and bools of one device as int64 arrays of the tensors' shapes, in one copy."""
    seen = torch.cat([tensor.reshape(-1).long() for tensor in tensors]).cpu().numpy()
    pieces = np.split(seen, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, tensors)]


def pages_of(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """How many pages of `capacity` tokens each they take."""
    return -(-tokens // capacity)
