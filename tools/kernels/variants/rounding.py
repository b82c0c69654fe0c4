"""Variants of the kernels that round keys, for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.ops.rounding.launch import feedback_of, round_keys, second_moment
from hf_diffkv.ops.rounding.reference import LARGEST_BITS
from hf_diffkv.pages import TierLayout
from tools.kernels.record import record
from tools.kernels.variant import UNIFORM_DIMS, KernelVariant, uniform_layouts

ROWS, HEADS, GROUP, TOKENS = 2, 2, 4, 16


def variants() -> list[KernelVariant]:
    """bf16 models without padding."""
    found = []
    for launch in (_feedback, _moment):
        for dim in UNIFORM_DIMS:
            found += [variant.named(f"{variant.name}-d{dim}") for variant in record(launch, dim)]
    for name, layout in uniform_layouts():
        tier = layout.high
        if tier.k_bits <= LARGEST_BITS:
            suffix = f"{name.removesuffix('_unscored')}-d{tier.key_dim}"
            found += [variant.named(f"{variant.name}-{suffix}") for variant in record(_round, tier)]
    return found


def _feedback(dim: int) -> None:
    feedback_of(torch.empty(ROWS, dim, dim))


def _moment(dim: int) -> None:
    second_moment(torch.empty(ROWS, HEADS * GROUP, TOKENS, dim, dtype=torch.bfloat16), HEADS)


def _round(tier: TierLayout) -> None:
    dim = tier.key_dim
    key, row = torch.empty(TOKENS, dim, dtype=torch.bfloat16), torch.empty(TOKENS, dtype=torch.int64)
    round_keys(key, row, torch.empty(ROWS, dim, dim), tier)
