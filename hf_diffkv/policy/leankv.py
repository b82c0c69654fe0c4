"""Levels by cumulative significance (LeanKV, arXiv 2412.03131)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import ForwardRows, Levels, Policy, Tokens, levels_of, option


@dataclass(frozen=True)
class LeanKV(Policy):
    """Prunes the least significant tokens that together have less than `low_cut` of a head's significance.

    The next ones, up to `high_cut`, are low, and the rest is high. A generated token is compared with the cuts of the
    last prompt, relative to 1/N: with the least significant token above each cut. Where nothing was below a cut, or no
    prompt was outside the window yet, that threshold is 0.

    Args:
        high_cut: the paper's T_h.
        low_cut: the paper's T_l, at most `high_cut`.
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


def rank_in_rows(row: Tensor, key: Tensor, position: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Ranks each token from the top of its row: the greatest `key` first, of equal ones the newest first.

    Args:
        row: int64 [n], the row of each token.
        key: [n] of any dtype.
        position: int64 [n].
        rows: number of rows.

    Returns:
        int64 [n], 0 for the first, and int64 [rows], the number of tokens of each row.
    """
    order = torch.argsort(position, descending=True)
    order = order[torch.argsort(key[order], descending=True, stable=True)]
    order = order[torch.argsort(row[order], stable=True)]
    count = torch.bincount(row, minlength=rows)
    rank = torch.empty_like(row)
    rank[order] = torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row[order]]
    return rank, count


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
    """Relative threshold between the tokens `above` a cut (bool [n]) and the others, float32 [rows]."""
    count = rows.length.numel()
    least = torch.full((count,), torch.inf, device=above.device)
    least.scatter_reduce_(0, tokens.row[above], tokens.mean[above], "amin")
    return torch.where(torch.bincount(tokens.row[~above], minlength=count) > 0, least * rows.length, 0.0)
