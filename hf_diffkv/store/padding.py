"""Where the padding of a batch is."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Padding:
    """Which logical positions of each request are real; costs nothing while there is no padding."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.batch_size, self.device = batch_size, device
        self.length = 0
        self._valid: Tensor | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._valid is None else self._valid.numel()

    def append(self, tokens: int, valid: Tensor | None) -> None:
        """Records `tokens` positions; valid: bool [batch, tokens], None where all are real."""
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
        """bool [] on the device: whether `mask` (bool [batch, length], None: all real) is this; None: it surely is."""
        if self._valid is None:
            return None if mask is None else mask.all()
        known = self._valid[:, : self.length]
        return known.all() if mask is None else (mask == known).all()

    def replace(self, mask: Tensor) -> None:
        """Makes `mask`, bool [batch, length], the real positions."""
        self._grow(self.length)
        self._valid[:, : self.length] = mask

    def mask(self) -> Tensor:
        """bool [batch, length]: real positions."""
        if self._valid is None:
            return torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.device)
        return self._valid[:, : self.length]

    def copy(self) -> Padding:
        """The same, to be changed independently."""
        twin = Padding(self.batch_size, self.device)
        twin.length, twin._valid = self.length, None if self._valid is None else self._valid.clone()
        return twin

    def select(self, index: Tensor) -> None:
        self.batch_size = index.numel()
        if self._valid is not None:
            self._valid = self._valid[index]
