"""Variants of the kernels that store a prompt without choosing tokens, for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.ops.prompt_tokens import Placement, PromptTokens
from hf_diffkv.ops.rotation import Rotation
from hf_diffkv.ops.rotation_kernel import rotate
from hf_diffkv.ops.rounding.reference import LARGEST_BITS
from hf_diffkv.ops.store_uniform.launch import store_uniform
from hf_diffkv.pages import PageLayout
from tools.kernels.record import record
from tools.kernels.rows import given_rows
from tools.kernels.variant import UNIFORM_DIMS, KernelVariant, paired_layouts, uniform_layouts

# what does not depend on the precision is listed once; on nothing but the tokens of a page, once for one tier or two
OF_MODELS = ("sum_keys", "fix_offsets", "rotate")
OF_ROWS = ("take_pages", "advance")
BATCH, HEADS, TOKENS, SLOTS, SINK_SLOTS, WIDTH = 2, 2, 16, 16, 4, 8


def variants() -> list[KernelVariant]:
    """bf16 models without padding, whose keys are rotated, centred and, if they can be, rounded for their queries."""
    found = []
    uniform, paired = uniform_layouts(), paired_layouts()
    for name, layout in uniform + paired:
        dim = layout.high.key_dim
        shipped = ["store_new", "leave_window"]
        shipped += OF_MODELS if name == uniform[0][0] else ()
        shipped += OF_ROWS if name in (uniform[0][0], paired[0][0]) and dim == UNIFORM_DIMS[0] else ()
        recorded = record(_store, layout) + record(_rotate, dim)
        found += [each.named(f"{each.name}-{name}-d{dim}") for each in recorded if each.name in shipped]
    return found


def _store(layout: PageLayout) -> None:
    dim, rows = layout.high.key_dim, (BATCH, HEADS)
    new = torch.empty(*rows, TOKENS, dim, dtype=torch.bfloat16)
    window, matrix = torch.empty(*rows, SLOTS, dim, dtype=torch.bfloat16), torch.empty(dim, dim)
    table, offset = torch.empty(*rows, WIDTH, dtype=torch.int32), torch.empty(*rows, dim)
    held = given_rows(layout, window, window, page_table=table, sink_slots=SINK_SLOTS, key_offset=offset)
    fewest = min(layout.high.k_bits, layout.low.k_bits)
    feedback = torch.empty(BATCH * HEADS, dim, dim) if fewest <= LARGEST_BITS else None
    placement = Placement(SLOTS - SINK_SLOTS, 1.0, Rotation(matrix, matrix), centers=True, feedback=feedback)
    store_uniform(held, PromptTokens(new, new), placement, holds=True)


def _rotate(dim: int) -> None:
    offset = torch.empty(BATCH * HEADS, dim)
    rotate(torch.empty(BATCH, HEADS, TOKENS, dim, dtype=torch.bfloat16), torch.empty(dim, dim), offset)
