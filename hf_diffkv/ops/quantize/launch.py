"""Launchers of the quantisation kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pages import TierLayout
from ...pages.rows import check_contents, check_pages
from ...pages.segments import Contents
from ..backend import INTERPRETER, launch, unit_stride
from .kernels import copy_tokens_kernel, load_tokens_kernel, store_tokens_kernel

TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
TILE_ELEMENTS = 2048
COPY_BYTES = 4096
NUM_WARPS = 4


def store_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, contents: Contents, dtype: torch.dtype
) -> None:
    """Quantises tokens into their slots in one launch for all heads; arguments as in the reference.

    Tokens sent to the null page are not written.
    """
    check_dtype(dtype)
    key, value, score, position = contents
    check_contents(pages, tier, page, key, value)
    if score.dtype != torch.float32:
        raise ValueError(f"score must be float32, not {score.dtype}.")
    if page.numel() == 0:
        return
    key, value = unit_stride(key), unit_stride(value)
    _launch(
        store_tokens_kernel,
        *(pages, tier, page, slot, dtype),
        key=key,
        value=value,
        score=score.contiguous(),
        position=position.contiguous(),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
    )


def load_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reads tokens back: keys [n, key_dim] and values [n, value_dim] in float32, zero for the null page."""
    check_dtype(dtype)
    check_pages(pages, tier)
    key = torch.empty(page.numel(), tier.key_dim, dtype=torch.float32, device=pages.device)
    value = torch.empty(page.numel(), tier.value_dim, dtype=torch.float32, device=pages.device)
    if page.numel() > 0:
        _launch(load_tokens_kernel, pages, tier, page, slot, dtype, key=key, value=value)
    return key, value


def _launch(
    kernel: Any, pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype, **given: object
) -> None:
    """Launches a kernel for all tokens at (page, slot)."""
    block, count = tile_tokens(tier), page.numel()
    given |= {"pages": pages, "page": page.contiguous(), "slot": slot.contiguous(), "count": count}
    constants = {"TIER": tier, "DTYPE": TRITON_DTYPES[dtype], "BLOCK": block, "num_warps": NUM_WARPS}
    launch(kernel, (triton.cdiv(count, block),), pages.device, given, **constants)


def move_tokens(
    pages: Tensor, tier: TierLayout, from_page: Tensor, from_slot: Tensor, to_page: Tensor, to_slot: Tensor
) -> None:
    """Copies stored tokens in one launch for all rows; arguments as in the reference."""
    check_pages(pages, tier)
    count, block = from_page.numel(), copy_block(tier)
    if count == 0:
        return
    places = {"from_page": from_page, "from_slot": from_slot, "to_page": to_page, "to_slot": to_slot}
    given = {name: place.contiguous() for name, place in places.items()} | {"pages": pages, "count": count}
    grid = (triton.cdiv(count, block),)
    launch(copy_tokens_kernel, grid, pages.device, given, TIER=tier, BLOCK=block, num_warps=NUM_WARPS)


def copy_block(tier: TierLayout) -> int:
    """Returns the number of tokens that a program copies, for tiles of about `COPY_BYTES` bytes."""
    return max(1, COPY_BYTES // triton.next_power_of_2(max(tier.key_row, tier.value_row)))


def check_dtype(dtype: torch.dtype) -> None:
    """Raises `ValueError` if the kernels do not support a model of `dtype`."""
    if dtype not in TRITON_DTYPES:
        raise ValueError(f"the kernels support {list(TRITON_DTYPES)}, not {dtype}; use the reference.")


def dot_dtype(dtype: torch.dtype, target: str) -> tl.dtype:
    """Returns the dtype of matrix products; float32 in the interpreter, which would round half precision."""
    return TRITON_DTYPES[torch.float32 if target == INTERPRETER else dtype]


def tile_tokens(tier: TierLayout) -> int:
    """Returns the number of tokens per program, for tiles of about `TILE_ELEMENTS` elements."""
    widest = triton.next_power_of_2(max(tier.key_dim, tier.value_dim))
    return max(1, min(64, TILE_ELEMENTS // widest))
