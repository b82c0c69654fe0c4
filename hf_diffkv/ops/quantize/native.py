"""Quantises tokens into pages, reads them back and copies them in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.library import DTYPES, Transfer, address, call, format_of_tier, unit_stride
from ...pages import TierLayout
from ...pages.rows import check_contents, check_pages
from ...pages.segments import Contents


def store_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, contents: Contents, dtype: torch.dtype
) -> None:
    """Quantises tokens into their slots; arguments as in the reference. Tokens sent to the null page are not written.

    Raises:
        CorruptMemoryError: a page or slot does not exist; nothing has changed.
    """
    key, value, score, position = contents
    check_contents(pages, tier, page, key, value)
    if key.dtype != value.dtype or key.dtype not in DTYPES:
        key, value = key.float(), value.float()
    key, value = unit_stride(key), unit_stride(value)
    block, places = _block(pages, tier, dtype, page, slot)
    score, position = score.float().contiguous(), position.to(torch.int64).contiguous()
    block.key, block.value, block.source = address(key), address(value), DTYPES[key.dtype]
    block.key_stride, block.value_stride = key.stride(0), value.stride(0)
    block.score, block.position = address(score), address(position)
    call("store", block)


def load_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reads tokens back: keys [n, key_dim] and values [n, value_dim] in float32, zero for the null page."""
    check_pages(pages, tier)
    block, places = _block(pages, tier, dtype, page, slot)
    key = torch.empty(page.numel(), tier.key_dim, dtype=torch.float32, device=page.device)
    value = torch.empty(page.numel(), tier.value_dim, dtype=torch.float32, device=page.device)
    block.key, block.value = address(key), address(value)
    block.key_stride, block.value_stride = tier.key_dim, tier.value_dim
    call("load", block)
    return key, value


def move_tokens(
    pages: Tensor, tier: TierLayout, from_page: Tensor, from_slot: Tensor, to_page: Tensor, to_slot: Tensor
) -> None:
    """Copies stored tokens; arguments as in the reference."""
    check_pages(pages, tier)
    # a copy does not depend on the dtype
    block, places = _block(pages, tier, torch.float32, from_page, from_slot)
    to_page, to_slot = to_page.contiguous(), to_slot.contiguous()
    block.to_page, block.to_slot = address(to_page), address(to_slot)
    call("store", block)


def _block(
    pages: Tensor, tier: TierLayout, dtype: torch.dtype, page: Tensor, slot: Tensor
) -> tuple[Transfer, tuple[Tensor, Tensor]]:
    """Returns the block of tokens at (page, slot), and the tensors to keep alive until it has run."""
    page, slot = page.contiguous(), slot.contiguous()
    block = Transfer(format=format_of_tier(tier, dtype), page_count=pages.shape[0], count=page.numel())
    block.pages, block.page, block.slot = address(pages), address(page), address(slot)
    block.threads = torch.get_num_threads()
    return block, (page, slot)
