"""Levels by cumulative significance (LeanKV, arXiv 2412.03131)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import ForwardRows, Levels, Policy, Tokens, levels_of, option
from .ranking import least_in_rows, rank_in_rows


@dataclass(frozen=True)
class LeanKV(Policy):
    """The least significant tokens that together have less than `low_cut` of a head's significance are pruned.

    The next, up to `high_cut`, are low, the rest is high. While generating, a token is compared with where the cuts
    were in the last prompt, relative to 1/N: with the least significant token above each cut. Where nothing was below
    a cut, or there was no prompt outside the window yet, that threshold is 0.

    Args:
        high_cut: the paper's T_h. low_cut: its T_l, at most `high_cut`.
    """

    high_cut: float = option(0.05, least=0, most=1)
    low_cut: float = option(0.0, least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_cut > self.high_cut:
            raise ValueError(f"policy_options: low_cut={self.low_cut} is above high_cut={self.high_cut}.")

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        share = _cumulative_share(tokens, rows.length.numel())
        high, kept = share >= self.high_cut, share >= self.low_cut
        return Levels(levels_of(high, kept), _relative_cut(tokens, rows, high), _relative_cut(tokens, rows, kept))


def _cumulative_share(tokens: Tokens, rows: int) -> Tensor:
    """Share of its row's significance that a token has together with all that are less significant, float64 [n]."""
    rank, count = rank_in_rows(tokens.row, tokens.mean, tokens.position, rows)
    end = count.cumsum(0)
    place = end[tokens.row] - 1 - rank
    total = torch.zeros_like(tokens.mean, dtype=torch.float64)
    total[place] = tokens.mean.double()
    # one longer, so that each row can take off what the rows before it have
    total = torch.cat([total.new_zeros(1), total.cumsum(0)])
    before, after = total[end - count][tokens.row], total[end][tokens.row]
    return (total[place + 1] - before) / (after - before)


def _relative_cut(tokens: Tokens, rows: ForwardRows, above: Tensor) -> Tensor:
    """Relative threshold between what is `above` a cut (bool [n]) and what is not, float32 [rows]."""
    count = rows.length.numel()
    cut = least_in_rows(tokens.mean, tokens.row, above, count) * rows.length
    return torch.where(torch.bincount(tokens.row[~above], minlength=count) > 0, cut, 0.0)
