"""Levels by cumulative significance (LeanKV, arXiv 2412.03131)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import ForwardRows, Levels, Policy, Tokens, levels_of, option


@dataclass(frozen=True)
class LeanKV(Policy):
    """LeanKV's policy: prunes the least significant tokens that together hold less than `low_cut` of a head's total.

    The next tokens, up to `high_cut`, are low, and the others are high. For generated tokens, each cut becomes a
    relative threshold: the significance of the last prompt's least significant token above the cut, times N. The
    threshold is 0 if no token was below the cut, or if no prompt has left the window yet.

    Args:
        high_cut: T_h of the paper.
        low_cut: T_l of the paper, at most `high_cut`.
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
    """Returns the cumulative share of each token, float64 [n].

    The cumulative share is the share of the row's significance that the token and all less significant ones hold. Among
    equally significant tokens, the oldest comes first.
    """
    order = torch.argsort(tokens.position)
    order = order[torch.argsort(tokens.mean[order], stable=True)]
    order = order[torch.argsort(tokens.row[order], stable=True)]
    # a leading zero, so that each row can subtract the total of the rows before it
    total = F.pad(tokens.mean[order].double().cumsum(0), (1, 0))
    count = torch.bincount(tokens.row, minlength=rows)
    end = count.cumsum(0)
    before, after = total[end - count][tokens.row], total[end][tokens.row]
    up_to = torch.empty_like(before)
    up_to[order] = total[1:]
    return (up_to - before) / (after - before)


def _relative_cut(tokens: Tokens, rows: ForwardRows, above: Tensor) -> Tensor:
    """Returns the relative threshold between the tokens `above` a cut (bool [n]) and the others, float32 [rows]."""
    count = rows.length.numel()
    least = torch.full((count,), torch.inf, dtype=torch.float32, device=above.device)
    least.scatter_reduce_(0, tokens.row[above], tokens.mean[above], "amin")
    return torch.where(torch.bincount(tokens.row[~above], minlength=count) > 0, least * rows.length, 0.0)
