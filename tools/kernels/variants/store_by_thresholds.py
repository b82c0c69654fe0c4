"""Variants of the kernels that store a prompt by thresholds, for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.prompt_tokens import Placement, PromptTokens
from hf_diffkv.ops.rotation import Rotation
from hf_diffkv.ops.store_by_thresholds.launch import store_by_thresholds
from hf_diffkv.pages import PageLayout
from tools.kernels.record import record
from tools.kernels.rows import given_rows
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
        found += [each.named(f"{each.name}-{name}-d{dim}") for each in record(_store, layout, False)]
        narrow = PageLayout.build(high, low, dim, dim, 2, metadata_bits=16, position_bytes=2)
        recorded = record(_store, narrow, True)
        found += [each.named(f"{each.name}-{name}-rotated-d{dim}") for each in recorded if each.name in TRANSFORMED]
    return found


def _store(layout: PageLayout, transforms: bool) -> None:
    dim, rows = layout.high.key_dim, (BATCH, HEADS)
    new = torch.empty(*rows, TOKENS, dim, dtype=torch.bfloat16)
    window, matrix = torch.empty(*rows, SLOTS, dim, dtype=torch.bfloat16), torch.empty(dim, dim)
    table, offset = torch.empty(*rows, WIDTH, dtype=torch.int32), torch.empty(*rows, dim if transforms else 0)
    held = given_rows(layout, window, window, page_table=table, sink_slots=SINK_SLOTS, key_offset=offset)
    options = {"rotation": Rotation(matrix, matrix), "centers": True, "feedback": torch.empty(BATCH * HEADS, dim, dim)}
    placement = Placement(SLOTS - SINK_SLOTS, 1.0, **options if transforms else {})
    received = torch.empty(*rows, PAST + TOKENS)
    store_by_thresholds(held, PromptTokens(new, new), placement, received)
