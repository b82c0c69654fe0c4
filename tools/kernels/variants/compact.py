"""What the ahead-of-time report compiles of the compaction kernels."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.compact.launch import compact_step
from hf_diffkv.pages import FreeList, PageLayout
from tools.kernels.record import record
from tools.kernels.variant import KernelVariant, uniform_layouts

SCORED = (
    *((Precision(8, 4), Precision(4, 2), dim) for dim in (64, 128, 256, 512)),
    (Precision(8, 8), Precision(8, 4), 128),
    (Precision(16, 16), Precision(16, 16), 128),
    *((Precision(6, 4), Precision(5, 3), dim) for dim in (64, 128)),
)
# what plans a round depends on pages by a few numbers only
PLANNED = {"K8V4-K4V2-d128": ("find_victims", "plan_rows", "assign_pages"), "K8V4_unscored-d128": ("plan_rows",)}
ROWS, WIDTH = 16, 8


def variants() -> list[KernelVariant]:
    """bf16 models."""
    layouts = [(f"{high.name}-{low.name}", PageLayout.build(high, low, dim, dim, 2)) for high, low, dim in SCORED]
    found = []
    for name, layout in layouts + uniform_layouts():
        suffix = f"{name}-d{layout.high.key_dim}"
        shipped = ("move_tokens", *PLANNED.get(suffix, ()))
        found += [each.named(f"{each.name}-{suffix}") for each in record(_step, layout) if each.name in shipped]
    return found


def _step(layout: PageLayout) -> None:
    high = layout.high
    counts, threshold = torch.empty(ROWS, dtype=torch.int32), torch.empty(ROWS) if layout.selects else None
    numbers = torch.empty(ROWS, dtype=torch.int64)
    key, value = (torch.empty(ROWS, dim, dtype=torch.bfloat16) for dim in (high.key_dim, high.value_dim))
    compact_step(
        torch.empty(1, layout.page_bytes, dtype=torch.uint8),
        layout,
        FreeList(counts.device),
        torch.empty(ROWS, WIDTH, dtype=torch.int32),
        counts,
        counts,
        key,
        value,
        torch.empty(ROWS),
        numbers,
        torch.empty(ROWS, dtype=torch.bool),
        numbers,
        threshold,
        threshold,
        max_tokens=high.capacity,
    )
