"""Launches the kernel that rounds keys."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...memory import PageLayout, TierLayout
from ...presets import UNIFORM_NUMBERS
from ..quantize.launch import TRITON_DTYPES, unit_stride
from ..variant import UNIFORM_DIMS, UNIFORM_PRECISIONS, KernelVariant
from .kernels import round_keys_kernel
from .reference import LARGEST_BITS

TILE_ELEMENTS = 2048
NUM_WARPS = 4


def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """As `reference.round_keys`, in float32; one launch."""
    count, dim = key.shape
    if dim != tier.key_dim or key.dtype not in TRITON_DTYPES or feedback.shape[1:] != (dim, dim):
        raise ValueError(
            f"key {key.dtype} {tuple(key.shape)} and feedback {tuple(feedback.shape)} must be [n, {tier.key_dim}] of "
            f"{list(TRITON_DTYPES)} and [rows, {tier.key_dim}, {tier.key_dim}]."
        )
    key = unit_stride(key)
    rounded = torch.empty(count, dim, dtype=torch.float32, device=key.device)
    constants = _constants(tier)
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
        round_keys_kernel[(triton.cdiv(count, constants["BLOCK"]),)](
            key,
            row.contiguous(),
            feedback.float().contiguous(),
            rounded,
            count,
            key.stride(0),
            **constants,
            num_warps=NUM_WARPS,
        )
    return rounded


def variants() -> list[KernelVariant]:
    """What the ahead-of-time report compiles."""
    found = []
    for precision, dim in itertools.product(UNIFORM_PRECISIONS, UNIFORM_DIMS):
        tier = PageLayout.build(precision, precision, dim, dim, 2, **UNIFORM_NUMBERS).high
        if tier.k_bits > LARGEST_BITS:
            continue
        pointers = {"key": "*bf16", "row": "*i64", "feedback": "*fp32", "rounded": "*fp32"}
        found.append(
            KernelVariant(
                name=f"round_keys-{precision.name}-d{dim}",
                kernel=round_keys_kernel,
                signature={**pointers, "count": "i32", "key_stride": "i32"},
                constexprs=_constants(tier),
                num_warps=NUM_WARPS,
            )
        )
    return found


def _constants(tier: TierLayout) -> dict[str, int]:
    width = triton.next_power_of_2(tier.key_dim)
    return {
        "DIM": tier.key_dim,
        "BITS": tier.k_bits,
        "GROUPS": tier.k_groups,
        "METADATA": tier.key_metadata,
        "WIDTH": width,
        "BLOCK": max(1, TILE_ELEMENTS // width),
    }
