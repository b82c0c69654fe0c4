"""What the ahead-of-time report compiles of the kernels by which new tokens enter rows."""

from __future__ import annotations

import torch

from hf_diffkv.ops.rotation_kernel import rotate
from hf_diffkv.ops.rounding.reference import LARGEST_BITS
from hf_diffkv.ops.store_uniform.launch import enter_tokens
from hf_diffkv.ops.store_uniform.rows import EnteredRows
from hf_diffkv.pages import FreeList, PageLayout
from tools.kernels.record import record
from tools.kernels.variant import UNIFORM_DIMS, KernelVariant, uniform_layouts

# what does not depend on the precision, and on nothing but the tokens of a page, is listed once
OF_MODELS = ("sum_keys", "fix_offsets", "rotate")
OF_ROWS = ("take_pages", "advance")
BATCH, HEADS, TOKENS, SLOTS, SINK_SLOTS, WIDTH = 2, 2, 16, 16, 4, 8


def variants() -> list[KernelVariant]:
    """bf16 models without padding, whose keys are rotated, centred and, if they can be, rounded for their queries."""
    found = []
    layouts = uniform_layouts()
    for name, layout in layouts:
        dim = layout.high.key_dim
        shipped = ["enter", "leave_window"]
        shipped += OF_MODELS if name == layouts[0][0] else ()
        shipped += OF_ROWS if name == layouts[0][0] and dim == UNIFORM_DIMS[0] else ()
        recorded = record(_enter, layout) + record(_rotate, dim)
        found += [each.named(f"{each.name}-{name}-d{dim}") for each in recorded if each.name in shipped]
    return found


def _enter(layout: PageLayout) -> None:
    tier, rows = layout.high, (BATCH, HEADS)
    dim = tier.key_dim
    new = torch.empty(*rows, TOKENS, dim, dtype=torch.bfloat16)
    window = torch.empty(*rows, SLOTS, dim, dtype=torch.bfloat16)
    length, matrix = torch.empty(BATCH, dtype=torch.int64), torch.empty(dim, dim)
    held = EnteredRows(
        page_table=torch.empty(*rows, WIDTH, dtype=torch.int32),
        high_count=torch.empty(*rows, dtype=torch.int32),
        window_key=window,
        window_value=window,
        window_score=torch.empty(*rows, SLOTS),
        length=length,
        window_start=length,
        sink_end=length,
        key_offset=torch.empty(*rows, dim),
        invalid=torch.empty((), dtype=torch.bool),
        sink_slots=SINK_SLOTS,
    )
    enter_tokens(
        held,
        torch.empty(1, layout.page_bytes, dtype=torch.uint8),
        layout,
        FreeList(length.device),
        new,
        new,
        rank=None,
        count=None,
        window=SLOTS - SINK_SLOTS,
        limit=1.0,
        key_rotation=matrix,
        value_rotation=matrix,
        centers=True,
        holds=True,
        feedback=torch.empty(BATCH * HEADS, dim, dim) if tier.k_bits <= LARGEST_BITS else None,
    )


def _rotate(dim: int) -> None:
    offset = torch.empty(BATCH * HEADS, dim)
    rotate(torch.empty(BATCH, HEADS, TOKENS, dim, dtype=torch.bfloat16), torch.empty(dim, dim), offset)
