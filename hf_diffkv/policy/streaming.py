"""Attention sinks and a sliding window (StreamingLLM, ICLR 2024, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import ForwardRows, Levels, Policy, StepRows, Tokens, keep_high, option


@dataclass(frozen=True)
class Streaming(Policy):
    """Keeps a request's first tokens and the window. Tokens keep the positions they were rotated to.

    Args:
        sinks: how many first tokens are kept.
    """

    sinks: int = option(4, least=0)

    by_alphas: ClassVar[bool] = False
    two_levels: ClassVar[bool] = False

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        return keep_high(tokens.position < self.sinks)

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        threshold = torch.where(rows.candidate < self.sinks, 0.0, torch.inf)
        return threshold, threshold
