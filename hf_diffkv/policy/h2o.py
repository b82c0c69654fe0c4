"""Heavy hitters under a fixed budget (H2O, NeurIPS 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import ForwardRows, Levels, Policy, StepRows, Tokens, keep_high, option
from .ranking import rank_in_rows, share_of


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps the most significant `budget` of the tokens outside the window, per head, and no more while generating.

    A generated token that leaves the window takes the place of the least significant stored one if it is more
    significant, else it is dropped. Heads that hold fewer than `minimum` tokens are filled up first. Significance is
    the mean attention received, as everywhere here; the paper ranks by the sum, which favours old tokens.

    Args:
        budget: share of the tokens outside the window at the last prompt.
        minimum: tokens that a head may hold whatever the share.
    """

    budget: float = option(0.3, least=0, most=1)
    minimum: int = option(64, least=0)

    by_alphas: ClassVar[bool] = False
    two_levels: ClassVar[bool] = False

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        rank, _ = rank_in_rows(tokens.row, tokens.mean, tokens.position, rows.length.numel())
        return keep_high(rank < share_of(rows.outside, self.budget).clamp(min=self.minimum)[tokens.row])

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        least = rows.least_mean()
        # just above the least: only what is more significant enters, and the least one is then below
        threshold = torch.where(rows.high_count < self.minimum, 0.0, least.nextafter(torch.full_like(least, torch.inf)))
        return threshold, threshold
