"""What the ahead-of-time report compiles of the kernels by which rows are levelled anew."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.store_by_thresholds.launch import relevel_tokens
from hf_diffkv.ops.store_by_thresholds.rows import LevelledRows
from hf_diffkv.pages import FreeList, PageLayout
from tools.kernels.record import record
from tools.kernels.variant import KernelVariant

DIMS = (64, 128)
BATCH, HEADS, TOKENS, PAST, SLOTS, SINK_SLOTS, WIDTH = 2, 2, 16, 16, 16, 4, 8
# where channels are transformed, only what touches them, or narrow numbers, is another kernel
TRANSFORMED = ("decide", "demote", "level_window", "level_new")


def variants() -> list[KernelVariant]:
    """bf16 models without padding: the paper's precisions (section 4.1), and these on narrow pages with keys rotated,
    centred and rounded for their queries."""
    high, low = Precision(8, 4), Precision(4, 2)
    found = []
    for dim in DIMS:
        layout = PageLayout.build(high, low, dim, dim, 2)
        name = f"{high.name}-{low.name}"
        found += [each.named(f"{each.name}-{name}-d{dim}") for each in record(_relevel, layout, False)]
        narrow = PageLayout.build(high, low, dim, dim, 2, metadata_bits=16, position_bytes=2)
        recorded = record(_relevel, narrow, True)
        found += [each.named(f"{each.name}-{name}-rotated-d{dim}") for each in recorded if each.name in TRANSFORMED]
    return found


def _relevel(layout: PageLayout, transforms: bool) -> None:
    dim, rows = layout.high.key_dim, (BATCH, HEADS)
    new = torch.empty(*rows, TOKENS, dim, dtype=torch.bfloat16)
    window = torch.empty(*rows, SLOTS, dim, dtype=torch.bfloat16)
    count, alpha = torch.empty(*rows, dtype=torch.int32), torch.empty(*rows)
    length, matrix = torch.empty(BATCH, dtype=torch.int64), torch.empty(dim, dim) if transforms else None
    held = LevelledRows(
        page_table=torch.empty(*rows, WIDTH, dtype=torch.int32),
        high_count=count,
        window_key=window,
        window_value=window,
        window_score=torch.empty(*rows, SLOTS),
        length=length,
        window_start=length,
        sink_end=length,
        key_offset=torch.empty(*rows, dim if transforms else 0),
        invalid=torch.empty((), dtype=torch.bool),
        sink_slots=SINK_SLOTS,
        low_count=count,
        alpha_high=alpha,
        alpha_low=alpha,
    )
    relevel_tokens(
        held,
        torch.empty(1, layout.page_bytes, dtype=torch.uint8),
        layout,
        FreeList(length.device),
        new,
        new,
        received=torch.empty(*rows, PAST + TOKENS),
        rank=None,
        count=None,
        window=SLOTS - SINK_SLOTS,
        limit=1.0,
        key_rotation=matrix,
        value_rotation=matrix,
        centers=transforms,
        feedback=torch.empty(BATCH * HEADS, dim, dim) if transforms else None,
        pin=(0, 0),
        pinned_sum=1.0,
    )
