"""A tensor of layers and slots that is resized in place, one layer at a time.

Memory for more slots, or for longer requests, is therefore never needed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_diffkv.pages.reserve import reserve


class GrowingTensor:
    """A tensor [layers, ...] in memory that grows in place where the device allows it.

    Args:
        first: first content, which is copied.

    Attributes:
        tensor: current tensor; another object after each `resize`.
    """

    def __init__(self, first: Tensor) -> None:
        self._memory = reserve(first.device)
        self.tensor = self._resized(first.shape, first.dtype)
        self.tensor.copy_(first)

    @property
    def granularity(self) -> int:
        """Bytes in multiples of which memory is taken; 0 if any size is possible."""
        return self._memory.granularity

    @property
    def slack(self) -> int:
        """Bytes held beyond those of the tensor."""
        return self._memory.slack

    @property
    def grows_in_place(self) -> bool:
        """Whether growing takes only the memory that is added."""
        return self._memory.grows_in_place

    def resize(self, shape: tuple[int, ...], place: Callable[[int, Tensor, Tensor], None]) -> None:
        """Changes the shape to `shape`, with as many layers as before.

        Args:
            place: function called with each layer's index, its new tensor of zeros, and a copy of its old one.

        Raises:
            MemoryError: the device has no memory; nothing has changed then.
        """
        old = self.tensor
        layers, before, after = old.shape[0], old[0].numel(), math.prod(shape[1:])
        # no layer is overwritten before it is read
        order = range(layers - 1, -1, -1) if after > before else range(layers)
        flat = self._resized((layers * max(before, after),), old.dtype)
        for layer in order:
            held = flat[layer * before : (layer + 1) * before].clone().view(old.shape[1:])
            fresh = flat[layer * after : (layer + 1) * after].zero_().view(shape[1:])
            place(layer, fresh, held)
        del flat, old
        self.tensor = self._resized(shape, self.tensor.dtype)

    def _resized(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self._memory.committed:
            self._memory.shrink(num_bytes)
        self._memory.commit(num_bytes)
        return self._memory.tensor[:num_bytes].view(dtype).view(shape)
