"""Random eviction with the prompt's ends pinned: the null hypothesis of every method that prunes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import ForwardRows, Levels, Policy, StepRows, Tokens, keep_high, option
from .ranking import HASHES, token_hash


@dataclass(frozen=True)
class Random(Policy):
    """Keeps the first tokens, the window, and every other token with the same probability.

    Whether a token is kept follows from the seed, its layer, head and position: neither a batch and its order nor the
    chunks of a prompt change it. The number kept varies about the budget as heads of a coin do.

    Args:
        budget: probability that a token is kept.
        pinned: how many first tokens are always kept.
        seed: another one keeps others.
    """

    budget: float = option(0.3, least=0, most=1)
    pinned: int = option(4, least=0)
    seed: int = option(0, least=0)

    by_alphas: ClassVar[bool] = False
    two_levels: ClassVar[bool] = False

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        return keep_high(self._kept(rows.layer, rows.head[tokens.row], tokens.position))

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        threshold = torch.where(self._kept(rows.layer, rows.head, rows.candidate), 0.0, torch.inf)
        return threshold, threshold

    def _kept(self, layer: int | Tensor, head: Tensor, position: Tensor) -> Tensor:
        lucky = token_hash(self.seed, layer, head, position) < self.budget * HASHES
        return lucky | (position < self.pinned)
