"""Tokens to add to rows. Their keys and values stay where they are until they are stored, so that none is copied more
than once, and few at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

# tokens that are copied at once; on other devices each part costs launches
READ_TOKENS, READ_TOKENS_BY_KERNELS = 1 << 12, 1 << 16


class TokenSource(Protocol):
    """Where keys and values are."""

    def __len__(self) -> int:
        """How many tokens are here."""

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, key_dim] and values [n, value_dim] of the tokens `index`, int64 [n]."""


@dataclass(frozen=True)
class Given:
    """Keys [tokens, key_dim] and values [tokens, value_dim]."""

    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return self.key.shape[0]

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.key[index], self.value[index]


@dataclass(frozen=True)
class NewTokens:
    """Tokens to add, sorted by row.

    Attributes:
        row, position: int64 [n]. score: float32 [n].
        sources: where their keys and values are.
        origin: int64 [n], which of all tokens of the sources, one after the other, each of them is.
    """

    row: Tensor
    score: Tensor
    position: Tensor
    sources: tuple[TokenSource, ...]
    origin: Tensor

    @classmethod
    def of(cls, row: Tensor, source: TokenSource, score: Tensor, position: Tensor) -> NewTokens:
        """All tokens of one source in its order."""
        return cls(row, score, position, (source,), torch.arange(row.numel(), device=row.device))

    def select(self, mask: Tensor) -> NewTokens:
        parts = (part[mask] for part in (self.row, self.score, self.position))
        return NewTokens(*parts, self.sources, self.origin[mask])

    def merge(self, other: NewTokens) -> NewTokens:
        """Both together, `self` before `other` within each row."""
        if not self.row.numel() or not other.row.numel():
            return self if other.row.numel() == 0 else other
        order = torch.argsort(torch.cat([self.row, other.row]), stable=True)
        origin = other.origin + sum(map(len, self.sources))
        pairs = ((self.row, other.row), (self.score, other.score), (self.position, other.position))
        parts = [torch.cat(pair)[order] for pair in pairs]
        return NewTokens(*parts, self.sources + other.sources, torch.cat([self.origin, origin])[order])

    def read(self, part: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some of the tokens, [n, dim]."""
        origin = self.origin[part]
        if len(self.sources) == 1:
            return self.sources[0].read(origin)
        pieces, places, start = [], [], 0
        for source in self.sources:
            here = ((origin >= start) & (origin < start + len(source))).nonzero()[:, 0]
            pieces.append(source.read(origin[here] - start))
            places.append(here)
            start += len(source)
        back = torch.argsort(torch.cat(places))
        dtype = reduce(torch.promote_types, (key.dtype for key, _ in pieces))
        return tuple(torch.cat([piece[side].to(dtype) for piece in pieces])[back] for side in (0, 1))

    def parts(self) -> list[slice]:
        """All tokens, so many at a time as are copied at once."""
        step = READ_TOKENS if self.row.device.type == "cpu" else READ_TOKENS_BY_KERNELS
        return [slice(start, start + step) for start in range(0, self.row.numel(), step)]

    def value_norm(self) -> Tensor:
        """L2 norms of the values, float32 [n]."""
        norms = [self.read(part)[1].float().norm(dim=-1) for part in self.parts()]
        return torch.cat(norms) if norms else self.score.new_zeros(0)
