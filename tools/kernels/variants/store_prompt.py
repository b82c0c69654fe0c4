"""Variants of the kernels that store a prompt, for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.rotation import Rotation
from hf_diffkv.ops.rotation_kernel import rotate
from hf_diffkv.ops.rounding.reference import LARGEST_BITS
from hf_diffkv.ops.store_prompt.launch import store_prompt
from hf_diffkv.ops.store_prompt.tokens import Placement, PromptTokens
from hf_diffkv.pages import PageLayout
from tools.kernels.record import record
from tools.kernels.rows import given_rows
from tools.kernels.variant import UNIFORM_DIMS, KernelVariant, paired_layouts, uniform_layouts

# kernels that do not depend on the precision are listed once; those that depend only on a page's tokens, once per tiers
OF_MODELS = ("sum_keys", "fix_offsets", "rotate")
OF_ROWS = ("take_pages", "advance")
# with thresholds, only kernels that touch transformed channels or narrow numbers differ
TRANSFORMED = ("decide", "demote", "level_window", "level_new")
DIMS = (64, 128)
BATCH, HEADS, TOKENS, PAST, SLOTS, SINK_SLOTS, WIDTH = 2, 2, 16, 16, 16, 4, 8


def variants() -> list[KernelVariant]:
    """bf16 models without padding. Tokens stored in order have keys that are rotated, centred and, if possible, rounded
    for their queries. Thresholds use the paper's precisions (section 4.1), also on narrow pages with such keys."""
    found = []
    uniform, paired = uniform_layouts(), paired_layouts()
    for name, layout in uniform + paired:
        dim = layout.high.key_dim
        shipped = ["store_new", "leave_window", "choose_codes"]
        shipped += OF_MODELS if name == uniform[0][0] else ()
        shipped += OF_ROWS if name in (uniform[0][0], paired[0][0]) and dim == UNIFORM_DIMS[0] else ()
        recorded = record(_store, layout, True) + record(_rotate, dim)
        found += [each.named(f"{each.name}-{name}-d{dim}") for each in recorded if each.name in shipped]
    high, low = Precision(8, 4), Precision(4, 2)
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
    fewest = min(layout.high.k_bits, layout.low.k_bits)
    feedback = torch.empty(BATCH * HEADS, dim, dim) if fewest <= LARGEST_BITS else None
    options = {"rotation": Rotation(matrix, matrix), "centers": True, "feedback": feedback}
    placement = Placement(SLOTS - SINK_SLOTS, 1.0, **options if transforms else {})
    received = torch.empty(*rows, PAST + TOKENS) if layout.selects else None
    store_prompt(held, PromptTokens(new, new), placement, PAST, received)


def _rotate(dim: int) -> None:
    offset = torch.empty(BATCH * HEADS, dim)
    rotate(torch.empty(BATCH, HEADS, TOKENS, dim, dtype=torch.bfloat16), torch.empty(dim, dim), offset)
