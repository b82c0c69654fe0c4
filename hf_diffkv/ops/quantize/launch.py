"""Launchers of the quantisation kernels."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pages import TierLayout
from ...pages.segments import Contents
from ..backend import INTERPRETER
from .copy_kernel import copy_tokens_kernel
from .kernels import load_tokens_kernel, store_tokens_kernel

TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
TILE_ELEMENTS = 2048
COPY_BYTES = 4096
NUM_WARPS = 4


def store_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, contents: Contents, dtype: torch.dtype
) -> None:
    """Quantises tokens and writes them to their slots, one launch for all heads; see the reference for the arguments.

    Tokens sent to the null page are not written at all.
    """
    check_dtype(dtype)
    count = page.numel()
    key, value, score, position = contents
    if score.dtype != torch.float32:
        raise ValueError(f"score must be float32, not {score.dtype}.")
    if count == 0:
        return
    key, value = unit_stride(key), unit_stride(value)
    block = tile_tokens(tier)
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        store_tokens_kernel[(triton.cdiv(count, block),)](
            pages,
            page.contiguous(),
            slot.contiguous(),
            key,
            value,
            score.contiguous(),
            position.contiguous(),
            count,
            key.stride(0),
            value.stride(0),
            TIER=tier,
            DTYPE=TRITON_DTYPES[dtype],
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


def load_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reads tokens back: key [n, key_dim], value [n, value_dim] in float32; zeros for the null page."""
    check_dtype(dtype)
    count = page.numel()
    key = torch.empty(count, tier.key_dim, dtype=torch.float32, device=pages.device)
    value = torch.empty(count, tier.value_dim, dtype=torch.float32, device=pages.device)
    if count == 0:
        return key, value
    block = tile_tokens(tier)
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        load_tokens_kernel[(triton.cdiv(count, block),)](
            pages,
            page.contiguous(),
            slot.contiguous(),
            key,
            value,
            count,
            TIER=tier,
            DTYPE=TRITON_DTYPES[dtype],
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
    return key, value


def move_tokens(
    pages: Tensor, tier: TierLayout, from_page: Tensor, from_slot: Tensor, to_page: Tensor, to_slot: Tensor
) -> None:
    """Copies tokens as they are stored, one launch for all rows; see the reference for the arguments."""
    count = from_page.numel()
    if count == 0:
        return
    places = [place.contiguous() for place in (from_page, from_slot, to_page, to_slot)]
    block = copy_block(tier)
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        copy_tokens_kernel[(triton.cdiv(count, block),)](
            pages, *places, count, TIER=tier, BLOCK=block, num_warps=NUM_WARPS
        )


def copy_block(tier: TierLayout) -> int:
    """Tokens that a program copies, so that a tile has about `COPY_BYTES` bytes."""
    return max(1, COPY_BYTES // triton.next_power_of_2(max(tier.key_row, tier.value_row)))


def check_dtype(dtype: torch.dtype) -> None:
    """Raises `ValueError` for a model dtype without a kernel."""
    if dtype not in TRITON_DTYPES:
        raise ValueError(f"the kernels support {list(TRITON_DTYPES)}, not {dtype}; use the reference.")


def dot_dtype(dtype: torch.dtype, target: str) -> tl.dtype:
    """What matrix products of `dtype` are computed in; the interpreter would round those of half precision."""
    return TRITON_DTYPES[torch.float32 if target == INTERPRETER else dtype]


def unit_stride(x: Tensor) -> Tensor:
    """`x` with elements of the last dimension next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def tile_tokens(tier: TierLayout) -> int:
    """Tokens per program, so that a tile has about `TILE_ELEMENTS` elements."""
    widest = triton.next_power_of_2(max(tier.key_dim, tier.value_dim))
    return max(1, min(64, TILE_ELEMENTS // widest))
