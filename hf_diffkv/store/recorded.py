"""Tokens that may still be taken back, as the model has them; rollback.py attends to them and stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.softmax import Softmax


@dataclass(frozen=True)
class Read:
    """Attention of a layer of the model from the newest n of some tokens; query: [batch, query_heads, n, key_dim]."""

    query: Tensor
    softmax: Softmax

    def part(self, tokens: int, start: int, stop: int) -> Read:
        """Those of the tokens [start, stop) of `tokens`."""
        first = tokens - self.query.shape[2]
        return replace(self, query=self.query[:, :, max(start - first, 0) : max(stop - first, 0)])

    def followed_by(self, other: Read, tokens: int) -> Read:
        """Both together, where `other` comes with `tokens` more; only queries without a gap up to the newest count."""
        if other.query.shape[2] < tokens:
            return other
        return replace(other, query=torch.cat([self.query, other.query], dim=2))


@dataclass(frozen=True)
class Recorded:
    """A layer's tokens that are not stored yet, as the model has them.

    Attributes:
        key, value: [batch, heads, tokens, dim].
        valid: bool [batch, tokens] or None. mask: bool [batch, 1, tokens, tokens] or None.
        reads: of the layer itself, from all tokens, and of the later ones that read these keys and values.
    """

    key: Tensor
    value: Tensor
    valid: Tensor | None
    mask: Tensor | None
    reads: tuple[Read, ...]

    @property
    def tokens(self) -> int:
        return self.key.shape[2]

    def part(self, start: int, stop: int) -> Recorded:
        """The tokens [start, stop)."""
        return replace(
            self,
            key=self.key[:, :, start:stop],
            value=self.value[:, :, start:stop],
            valid=None if self.valid is None else self.valid[:, start:stop],
            mask=None if self.mask is None else self.mask[:, :, start:stop, start:stop],
            reads=tuple(read.part(self.tokens, start, stop) for read in self.reads),
        )

    def followed_by(self, other: Recorded) -> Recorded:
        """Both together; `other` attends all of `self`."""
        return Recorded(
            torch.cat([self.key, other.key], dim=2),
            torch.cat([self.value, other.value], dim=2),
            self._joined_valid(other),
            self._joined_mask(other),
            tuple(mine.followed_by(theirs, other.tokens) for mine, theirs in zip(self.reads, other.reads)),
        )

    def _joined_valid(self, other: Recorded) -> Tensor | None:
        if self.valid is None and other.valid is None:
            return None
        return torch.cat([self.real(), other.real()], dim=1)

    def _joined_mask(self, other: Recorded) -> Tensor | None:
        if self.mask is None and other.mask is None:
            return None
        first, total = self.tokens, self.tokens + other.tokens
        mask = torch.ones(self.key.shape[0], 1, total, total, dtype=torch.bool, device=self.key.device).tril()
        if self.mask is not None:
            mask[:, :, :first, :first] = self.mask
        if other.mask is not None:
            mask[:, :, first:, first:] = other.mask
        return mask

    def detached(self) -> Recorded:
        """A copy that keeps no larger tensor alive."""
        reads = tuple(replace(read, query=read.query.clone()) for read in self.reads)
        return replace(self, key=self.key.clone(), value=self.value.clone(), reads=reads)

    def select(self, index: Tensor) -> Recorded:
        """The requests `index`, int64 [n]."""
        return replace(
            self,
            key=self.key[index],
            value=self.value[index],
            valid=None if self.valid is None else self.valid[index],
            mask=None if self.mask is None else self.mask.expand(self.key.shape[0], -1, -1, -1)[index],
            reads=tuple(replace(read, query=read.query[index]) for read in self.reads),
        )

    def real(self) -> Tensor:
        """bool [batch, tokens]: which are no padding."""
        if self.valid is None:
            return torch.ones(self.key.shape[0], self.tokens, dtype=torch.bool, device=self.key.device)
        return self.valid

    @property
    def bytes(self) -> int:
        """Bytes held until the next `commit`."""
        tensors = (self.key, self.value, self.valid, self.mask, *(read.query for read in self.reads))
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
