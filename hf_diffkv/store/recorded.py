"""Recorded tokens, which may still be cropped, in the model's form; rollback.py attends to them and stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.softmax import Softmax


@dataclass(frozen=True)
class Read:
    """Attention of one layer of the model from the newest n of some tokens.

    Attributes:
        query: query states, [batch, query_heads, n, key_dim].
        softmax: softmax parameters of the layer.
    """

    query: Tensor
    softmax: Softmax

    def part(self, tokens: int, start: int, stop: int) -> Read:
        """Returns the queries of the tokens [start, stop) out of `tokens`."""
        first = tokens - self.query.shape[2]
        return replace(self, query=self.query[:, :, max(start - first, 0) : max(stop - first, 0)])

    def followed_by(self, other: Read, tokens: int) -> Read:
        """Returns the read continued by `other`, the read of the next `tokens` tokens.

        If `other` has no queries for some of them, the queries of `self` are dropped, so that no gap remains.
        """
        if other.query.shape[2] < tokens:
            return other
        return replace(other, query=torch.cat([self.query, other.query], dim=2))


@dataclass(frozen=True)
class Recorded:
    """A layer's tokens that are not stored yet, in the model's form.

    Attributes:
        key, value: key and value states, [batch, heads, tokens, dim].
        valid: True for real tokens, bool [batch, tokens]; None if all are.
        mask: attention mask among the tokens, bool [batch, 1, tokens, tokens]; None is causal.
        reads: read of the layer itself, from all tokens, then those of later layers that read these keys and values.
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
        """Returns the tokens [start, stop)."""
        return replace(
            self,
            key=self.key[:, :, start:stop],
            value=self.value[:, :, start:stop],
            valid=None if self.valid is None else self.valid[:, start:stop],
            mask=None if self.mask is None else self.mask[:, :, start:stop, start:stop],
            reads=tuple(read.part(self.tokens, start, stop) for read in self.reads),
        )

    def followed_by(self, other: Recorded) -> Recorded:
        """Returns the tokens of `self` and `other`; `other` attends to all of `self`."""
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
        """Returns a copy that keeps no larger tensor alive."""
        reads = tuple(replace(read, query=read.query.clone()) for read in self.reads)
        return replace(self, key=self.key.clone(), value=self.value.clone(), reads=reads)

    def select(self, index: Tensor) -> Recorded:
        """Returns the requests `index`, int64 [n]."""
        return replace(
            self,
            key=self.key[index],
            value=self.value[index],
            valid=None if self.valid is None else self.valid[index],
            mask=None if self.mask is None else self.mask.expand(self.key.shape[0], -1, -1, -1)[index],
            reads=tuple(replace(read, query=read.query[index]) for read in self.reads),
        )

    def real(self) -> Tensor:
        """Returns a mask of the real tokens, bool [batch, tokens]."""
        if self.valid is None:
            return torch.ones(self.key.shape[0], self.tokens, dtype=torch.bool, device=self.key.device)
        return self.valid

    @property
    def bytes(self) -> int:
        """Bytes held until the next `commit`, padding masks included."""
        tensors = (self.key, self.value, self.valid, self.mask, *(read.query for read in self.reads))
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
