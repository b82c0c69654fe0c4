"""Quantise keys and values into pages, and read them back."""

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
    """Arguments as in `reference.store_tokens`."""
    implementation = _implementation(pages.device, dtype, tier)
    implementation.store_tokens(pages, tier, page, slot, contents, dtype)


@without_autocast
def load_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `reference.load_tokens`."""
    implementation = _implementation(pages.device, dtype, tier)
    return implementation.load_tokens(pages, tier, page, slot, dtype)


def move_tokens(
    pages: Tensor,
    tier: TierLayout,
    from_page: Tensor,
    from_slot: Tensor,
    to_page: Tensor,
    to_slot: Tensor,
    dtype: torch.dtype,
) -> None:
    """Copies tokens as they are stored, code for code.

    Args:
        pages: uint8 [pages, page_bytes], written in place.
        from_page, from_slot, to_page, to_slot: int64 [n]; no two targets are alike, and none is a source.
        dtype: the model's dtype.
    """
    implementation = _implementation(pages.device, dtype, tier)
    implementation.move_tokens(pages, tier, from_page, from_slot, to_page, to_slot)


def _implementation(device: torch.device, dtype: torch.dtype, tier: TierLayout) -> ModuleType:
    backend = choose(device, dtype, tier)
    if backend == KERNELS:
        from . import launch

        return launch
    return native if backend == NATIVE else reference
