"""What is stored of tokens, and what pages must be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...pages import TierLayout


class Contents(NamedTuple):
    """What pages hold of n tokens.

    Attributes:
        key, value: [n, key_dim], [n, value_dim].
        score: float32 [n] significance sums. position: int [n].
    """

    key: Tensor
    value: Tensor
    score: Tensor
    position: Tensor

    def check(self, tier: TierLayout, count: int) -> None:
        """Raises `ValueError` unless keys and values are those of `count` tokens."""
        if self.key.shape != (count, tier.key_dim) or self.value.shape != (count, tier.value_dim):
            raise ValueError(
                f"key {tuple(self.key.shape)} and value {tuple(self.value.shape)} must be [{count}, {tier.key_dim}] "
                f"and [{count}, {tier.value_dim}]."
            )


def check_pages(pages: Tensor, tier: TierLayout) -> None:
    """Raises `ValueError` unless `pages` is uint8 [pages, page_bytes] with contiguous rows."""
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != tier.page_bytes or not pages.is_contiguous():
        raise ValueError(
            f"pages must be contiguous uint8 [pages, {tier.page_bytes}], not {pages.dtype} {tuple(pages.shape)}."
        )
