"""Quantises keys and values into pages and reads them back."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...pages import TierLayout
from ...pages.segments import Contents
from ..backend import KERNELS, NATIVE, choose, without_autocast
from . import native, reference
from .reference import dequantize, quantize

__all__ = ["dequantize", "load_tokens", "move_tokens", "quantize", "store_tokens"]


@without_autocast
def store_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, contents: Contents, dtype: torch.dtype
) -> None:
    """Quantises tokens into their slots; arguments as in `reference.store_tokens`.

    Raises:
        ValueError: pages have another dtype or shape, or keys or values are not those of n tokens.
    """
    count, key, value = page.numel(), contents.key, contents.value
    if key.shape != (count, tier.key_dim) or value.shape != (count, tier.value_dim):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [{count}, {tier.key_dim}] and "
            f"[{count}, {tier.value_dim}]."
        )
    _form(pages, tier, dtype).store_tokens(pages, tier, page, slot, contents, dtype)


@without_autocast
def load_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reads tokens back; arguments and results as in `reference.load_tokens`.

    Raises:
        ValueError: pages have another dtype or shape.
    """
    return _form(pages, tier, dtype).load_tokens(pages, tier, page, slot, dtype)


def move_tokens(
    pages: Tensor,
    tier: TierLayout,
    from_page: Tensor,
    from_slot: Tensor,
    to_page: Tensor,
    to_slot: Tensor,
    dtype: torch.dtype,
) -> None:
    """Copies stored tokens without requantising them.

    Args:
        pages: memory of the pages, uint8 [pages, page_bytes], written in place.
        tier: layout of the tokens' tier.
        from_page, from_slot: sources, int64 [n] each.
        to_page, to_slot: targets, int64 [n] each; all different, and none is a source.
        dtype: the model's dtype.

    Raises:
        ValueError: pages have another dtype or shape.
    """
    _form(pages, tier, dtype).move_tokens(pages, tier, from_page, from_slot, to_page, to_slot)


def _form(pages: Tensor, tier: TierLayout, dtype: torch.dtype) -> ModuleType:
    """Returns the implementation for `pages`, which must be contiguous uint8 [pages, page_bytes]."""
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != tier.page_bytes or not pages.is_contiguous():
        raise ValueError(
            f"pages must be contiguous uint8 [pages, {tier.page_bytes}], not {pages.dtype} {tuple(pages.shape)}."
        )
    backend = choose(pages.device, dtype, tier)
    if backend == KERNELS:
        from . import launch

        return launch
    return native if backend == NATIVE else reference
