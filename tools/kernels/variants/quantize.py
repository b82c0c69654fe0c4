"""Variants of the kernels that store, load and move tokens, for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.quantize.launch import load_tokens, move_tokens, store_tokens
from hf_diffkv.pages import PageLayout, TierLayout
from hf_diffkv.pages.segments import Contents
from tools.kernels.record import record
from tools.kernels.variant import KernelVariant, uniform_layouts

SCORED = (
    *((Precision(8, 4), dim) for dim in (64, 96, 128, 256, 512)),
    (Precision(4, 2), 128),
    (Precision(8, 8), 128),
    (Precision(16, 16), 128),
    (Precision(16, 16), 512),
    (Precision(4, 1, 4, 2), 128),
    (Precision(6, 4), 128),
    (Precision(5, 3), 64),
    (Precision(5, 3), 128),
)
COUNT = 16


def variants() -> list[KernelVariant]:
    """bf16 models."""
    layouts = [(one.name, PageLayout.build(one, one, dim, dim, 2)) for one, dim in SCORED] + uniform_layouts()
    found = []
    for name, layout in layouts:
        tier = layout.high
        suffix = f"{name}-g{tier.k_groups}{tier.v_groups}-d{tier.key_dim}"
        found += [variant.named(f"{variant.name}-{suffix}") for variant in record(_store_and_load, tier)]
    return found


def _store_and_load(tier: TierLayout) -> None:
    pages = torch.empty(1, tier.page_bytes, dtype=torch.uint8)
    place = torch.empty(COUNT, dtype=torch.int64)
    key, value = (torch.empty(COUNT, dim, dtype=torch.bfloat16) for dim in (tier.key_dim, tier.value_dim))
    store_tokens(pages, tier, place, place, Contents(key, value, torch.empty(COUNT), place), torch.bfloat16)
    load_tokens(pages, tier, place, place, torch.bfloat16)
    move_tokens(pages, tier, place, place, place, place)
