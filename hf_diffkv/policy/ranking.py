"""Ranks within rows, for policies that keep a number of tokens and not what passes a threshold."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_in_rows(row: Tensor, key: Tensor, position: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rank of each token from the top of its row: the greatest `key` first, of equal ones the newest first.

    Args:
        row, position: int64 [n]. key: [n] of any type.

    Returns:
        int64 [n], 0 for the first, and int64 [rows], how many tokens each row has.
    """
    order = torch.argsort(position, descending=True)
    order = order[torch.argsort(key[order], descending=True, stable=True)]
    order = order[torch.argsort(row[order], stable=True)]
    count = torch.bincount(row, minlength=rows)
    rank = torch.empty_like(row)
    rank[order] = torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row[order]]
    return rank, count


def share_of(count: Tensor, share: float) -> Tensor:
    """`share` of each count, int64, rounded half up."""
    return (count.double() * share + 0.5).floor().long()


def least_in_rows(value: Tensor, row: Tensor, chosen: Tensor, rows: int) -> Tensor:
    """Least `value` (float32 [n]) of the tokens that are `chosen` (bool [n]) in each row; +inf where there are none."""
    least = torch.full((rows,), torch.inf, device=value.device)
    return least.scatter_reduce_(0, row[chosen], value[chosen], "amin")
