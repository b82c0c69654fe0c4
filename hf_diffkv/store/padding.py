"""Which logical positions of each request are real, and which are padding."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Padding:
    """Mask of each request's real logical positions; takes no memory while there is no padding."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.batch_size, self.device, self.length = batch_size, device, 0
        self._valid: Tensor | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._valid is None else self._valid.numel()

    def append(self, tokens: int, valid: Tensor | None) -> None:
        """Appends `tokens` positions; `valid` marks the real ones, bool [batch, tokens], or None if all are."""
        if valid is not None or self._valid is not None:
            self._grow(self.length + tokens)
            self._valid[:, self.length : self.length + tokens] = True if valid is None else valid
        self.length += tokens

    def _grow(self, length: int) -> None:
        have = 0 if self._valid is None else self._valid.shape[1]
        if length <= have:
            return
        grown = torch.ones(self.batch_size, math.ceil(length * 1.125), dtype=torch.bool, device=self.device)
        if self._valid is not None:
            grown[:, :have] = self._valid
        self._valid = grown

    def equals(self, mask: Tensor | None) -> Tensor | None:
        """Returns whether `mask`, bool [batch, length] or None for all real, has the same real positions.

        The result is bool [] on the device, or None if they are the same for certain.
        """
        if self._valid is None:
            return None if mask is None else mask.all()
        known = self._valid[:, : self.length]
        return known.all() if mask is None else (mask == known).all()

    def replace(self, mask: Tensor) -> None:
        """Sets the real positions to `mask`, bool [batch, length]."""
        self._grow(self.length)
        self._valid[:, : self.length] = mask

    def mask(self) -> Tensor:
        """Returns the real positions, bool [batch, length]."""
        if self._valid is None:
            return torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.device)
        return self._valid[:, : self.length]

    def copy(self) -> Padding:
        """Returns an independent copy."""
        twin = Padding(self.batch_size, self.device)
        twin.length, twin._valid = self.length, None if self._valid is None else self._valid.clone()
        return twin

    def select(self, index: Tensor) -> None:
        self.batch_size = index.numel()
        if self._valid is not None:
            self._valid = self._valid[index]
