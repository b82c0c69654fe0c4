"""Ranks within rows, and lots drawn for tokens: for policies that keep a number of them and no threshold decides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HASHES = 2**32
# odd, below 2**31 so that no product exceeds 63 bits
MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)


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


def token_hash(seed: int, layer: int | Tensor, head: Tensor, position: Tensor) -> Tensor:
    """Random numbers that belong to a token: the same for any batch, chunking or order of requests.

    Returns:
        Whole numbers in [0, 2**32), int64, each as likely as any other. The arguments are int64 and broadcast.
    """
    mixed: Any = _mix(seed % HASHES)
    for part in (layer, head, position):
        mixed = _mix(mixed ^ part)
    return mixed


def _mix(x: Any) -> Any:
    """A multiply-xorshift hash of 32 bits; inputs that differ in one bit give unrelated outputs."""
    for multiplier, shift in zip(MULTIPLIERS, (15, 13)):
        x = ((x ^ (x >> 16)) + 0x9E3779B9) % HASHES * multiplier % HASHES
        x = x ^ (x >> shift)
    return x
