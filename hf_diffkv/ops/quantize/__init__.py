"""Quantises keys and values into pages and reads them back."""

from __future__ import annotations

import torch
from torch import Tensor

from ...pages import TierLayout


def check_pages(pages: Tensor, tier: TierLayout) -> None:
    """Raises `ValueError` unless `pages` is the memory of this tier's pages."""
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != tier.page_bytes or not pages.is_contiguous():
        raise ValueError(
            f"pages must be contiguous uint8 [pages, {tier.page_bytes}], not {pages.dtype} {tuple(pages.shape)}."
        )


def check_tokens(pages: Tensor, tier: TierLayout, page: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises `ValueError` unless the pages fit (`check_pages`) and each entry of `page` has a key and a value."""
    check_pages(pages, tier)
    count = page.numel()
    if key.shape != (count, tier.key_dim) or value.shape != (count, tier.value_dim):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [{count}, {tier.key_dim}] and "
            f"[{count}, {tier.value_dim}]."
        )
