"""What the ahead-of-time report compiles of the decode attention kernels."""

from __future__ import annotations

from itertools import product

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention.launch import decode_attention
from hf_diffkv.pages import PageLayout
from tools.kernels.record import record
from tools.kernels.variant import KernelVariant, uniform_layouts

DIMS = (64, 80, 96, 128, 256, 512)
SCORED = (
    ("K8V4-K4V2", Precision(8, 4), Precision(4, 2), DIMS),
    ("K8V8", Precision(8, 8), Precision(8, 8), DIMS),
    ("K16V16", Precision(16, 16), Precision(16, 16), DIMS),
    ("K6V4-K5V3", Precision(6, 4), Precision(5, 3), (64, 128)),
    ("K4V3-K3V2", Precision(4, 3), Precision(3, 2), (64, 128)),
)
# query heads per KV head
GROUPS = (1, 4, 5, 7, 8)
TARGETS = {"cuda": ("sm_80", "sm_90"), "hip": ("gfx942",)}
BATCH, KV_HEADS, SLOTS, SINK_SLOTS, WIDTH, TOKENS = 2, 2, 16, 4, 8, 64


def variants() -> list[KernelVariant]:
    """bf16 models without padding, soft-capping or learned sinks."""
    layouts = [(name, PageLayout.build(high, low, dim, dim, 2)) for name, high, low, dims in SCORED for dim in dims]
    found = []
    for (name, layout), group, (backend, targets) in product(layouts + uniform_layouts(), GROUPS, TARGETS.items()):
        suffix = f"{name}-d{layout.high.key_dim}-g{group}-{backend}"
        recorded = record(_attend, layout, group, targets=targets)
        found += [variant.named(f"decode_{variant.name}-{suffix}") for variant in recorded]
    return found


def _attend(layout: PageLayout, group: int) -> None:
    rows, high = (BATCH, KV_HEADS), layout.high
    count, length = torch.empty(rows, dtype=torch.int32), torch.empty(BATCH, dtype=torch.int64)
    decode_attention(
        torch.empty(BATCH, KV_HEADS * group, high.key_dim, dtype=torch.bfloat16),
        torch.empty(1, layout.page_bytes, dtype=torch.uint8),
        layout,
        torch.empty(*rows, WIDTH, dtype=torch.int32),
        count,
        count,
        torch.empty(*rows, SLOTS, high.key_dim, dtype=torch.bfloat16),
        torch.empty(*rows, SLOTS, high.value_dim, dtype=torch.bfloat16),
        torch.empty(*rows, SLOTS),
        length,
        length,
        scaling=1.0,
        max_tokens=TOKENS,
        sink_end=length,
        sink_slots=SINK_SLOTS,
    )
