"""Variants of the decode attention kernels for the ahead-of-time report."""

from __future__ import annotations

from itertools import chain, product

import torch

from hf_diffkv.config import Precision
from hf_diffkv.config.latent import LATENT_LADDER
from hf_diffkv.ops.decode_attention.launch import decode_attention
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import PageLayout
from hf_diffkv.pages.layout import UNIFORM_NUMBERS
from tools.kernels.record import record
from tools.kernels.rows import given_rows
from tools.kernels.variant import PAIRS, KernelVariant, paired_layouts, uniform_layouts

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
# the part of the compiled variants that is modelled
MODELLED = (4,)
TARGETS = {"cuda": ("sm_80", "sm_90"), "hip": ("gfx942",)}
# elements of a rotary key and a latent, in GLM-4.7-Flash (20 query heads) and DeepSeek V3 (128)
LATENT_DIMS = (64, 512)
LATENTS = (*product(("K16V16", *LATENT_LADDER), (20,)), ("K8V8", 128))
BATCH, KV_HEADS, SLOTS, SINK_SLOTS, WIDTH, TOKENS = 2, 2, 16, 4, 8, 64


def variants() -> list[KernelVariant]:
    """bf16 models without padding, soft-capping or learned sinks."""
    layouts = [(name, PageLayout.build(high, low, dim, dim, 2)) for name, high, low, dims in SCORED for dim in dims]
    found = []
    shipped = product(layouts + uniform_layouts() + paired_layouts(), GROUPS, TARGETS.items())
    modelled = product(paired_layouts(PAIRS[1:]), MODELLED, TARGETS.items())
    for (name, layout), group, (backend, targets) in chain(shipped, modelled):
        suffix = f"{name}-d{layout.high.key_dim}-g{group}-{backend}"
        recorded = record(_attend, layout, group, targets=targets)
        found += [variant.named(f"decode_{variant.name}-{suffix}") for variant in recorded]
    for (name, heads), (backend, targets) in product(LATENTS, TARGETS.items()):
        precision = Precision.parse(name)
        layout = PageLayout.build(precision, precision, *LATENT_DIMS, 2, **UNIFORM_NUMBERS)
        recorded = record(_attend, layout, heads, sum(LATENT_DIMS), targets=targets)
        found += [variant.named(f"decode_{variant.name}-{name}-latents-h{heads}-{backend}") for variant in recorded]
    return found


def _attend(layout: PageLayout, group: int, query_dim: int | None = None) -> None:
    high, rows = layout.high, (BATCH, KV_HEADS)
    query = torch.empty(BATCH, KV_HEADS * group, query_dim or high.key_dim, dtype=torch.bfloat16)
    window = [torch.empty(*rows, SLOTS, dim, dtype=torch.bfloat16) for dim in (high.key_dim, high.value_dim)]
    table = torch.empty(*rows, WIDTH, dtype=torch.int32)
    rows = given_rows(layout, *window, page_table=table, sink_slots=SINK_SLOTS)
    decode_attention(query, rows, Softmax(1.0), bounds=Bounds(TOKENS))
