"""The same budget for every head, by what the last queries attend to (SnapKV, NeurIPS 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from .base import ForwardRows, Levels, Policy, Tokens, keep_high, option
from .ranking import rank_in_rows, share_of


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keeps the most significant `budget` of the tokens outside the window, per head; generated tokens are kept.

    Significance is that of the paper's 32 last queries, unless `DiffKVConfig.observation_window` says otherwise.

    Args:
        budget: share of the tokens outside the window.
        pool: positions over which significance is averaged before ranking, odd; 1 is none. Positions that hold nothing
            count as 0.
    """

    budget: float = option(0.3, least=0, most=1)
    pool: int = option(5, least=1)

    observation_window: ClassVar[int | None] = 32
    two_levels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"policy_options: pool={self.pool} must be odd, so that it has a middle.")

    def layer_budget(self, rows: ForwardRows) -> float:
        """The share for this layer."""
        return self.budget

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        rank, _ = rank_in_rows(tokens.row, self._pooled(tokens, rows), tokens.position, rows.length.numel())
        return keep_high(rank < share_of(rows.outside, self.layer_budget(rows))[tokens.row])

    def _pooled(self, tokens: Tokens, rows: ForwardRows) -> Tensor:
        half = self.pool // 2
        if half == 0 or tokens.row.numel() == 0:
            return tokens.mean
        line = tokens.mean.new_zeros(rows.length.numel(), int(tokens.position.max()) + 1 + 2 * half)
        line[tokens.row, tokens.position + half] = tokens.mean
        return functional.avg_pool1d(line[None], self.pool, stride=1)[0][tokens.row, tokens.position]
