"""Variants of the compaction kernels for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.compact.launch import compact_windows
from hf_diffkv.ops.rounding import LARGEST_BITS, ModelFeedback
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import PageLayout
from tools.kernels.record import record
from tools.kernels.rows import given_rows
from tools.kernels.variant import KernelVariant, paired_layouts, uniform_layouts

SCORED = (
    *((Precision(8, 4), Precision(4, 2), dim) for dim in (64, 128, 256, 512)),
    (Precision(8, 8), Precision(8, 4), 128),
    (Precision(16, 16), Precision(16, 16), 128),
    *((Precision(6, 4), Precision(5, 3), dim) for dim in (64, 128)),
)
# kernels that plan a round depend on few numbers of the page layout
PLANNED = {
    "K8V4-K4V2-d128": ("find_victims", "plan_rows", "assign_pages"),
    "K8V4_unscored-d128": ("plan_rows",),
    "K5V4-K3V3_unscored-d128": ("plan_rows",),
}
ROWS, SLOTS, WIDTH = 16, 4, 8


def variants() -> list[KernelVariant]:
    """bf16 models."""
    layouts = [(f"{high.name}-{low.name}", PageLayout.build(high, low, dim, dim, 2)) for high, low, dim in SCORED]
    found = []
    for name, layout in layouts + uniform_layouts() + paired_layouts():
        suffix = f"{name}-d{layout.high.key_dim}"
        shipped = ("move_tokens", *PLANNED.get(suffix, ()))
        found += [each.named(f"{each.name}-{suffix}") for each in record(_step, layout) if each.name in shipped]
        if layout.low.k_bits <= LARGEST_BITS:
            rounds = record(_step, layout, True)
            found += [each.named(f"{each.name}-{suffix}-rounds") for each in rounds if each.name == "move_tokens"]
    return found


def _step(layout: PageLayout, rounds: bool = False) -> None:
    high, rows = layout.high, (ROWS, 1)
    window = [torch.empty(*rows, SLOTS, dim, dtype=torch.bfloat16) for dim in (high.key_dim, high.value_dim)]
    held = given_rows(layout, *window, page_table=torch.empty(*rows, WIDTH, dtype=torch.int32))
    threshold, flag = torch.empty(rows), torch.empty(1, dtype=torch.int32)
    low_threshold = threshold if layout.selects else None
    feedback = None
    if rounds:
        matrix = torch.empty(1, 1, high.key_dim, high.key_dim, dtype=torch.bfloat16)
        feedback = ModelFeedback(matrix, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    bounds = Bounds(high.capacity)
    compact_windows(held, SLOTS - 1, threshold, low_threshold, bounds=bounds, flag=flag, feedback=feedback)
