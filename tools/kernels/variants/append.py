"""Variants of the append kernel for the ahead-of-time report."""

from __future__ import annotations

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.append.launch import append_token
from hf_diffkv.ops.rotation import Rotation
from hf_diffkv.pages import PageLayout
from tools.kernels.record import record
from tools.kernels.rows import given_rows
from tools.kernels.variant import KernelVariant

# KV heads and head_dim
PLAIN = ((8, 80), (8, 128), (32, 128), (8, 512))
ROTATED = ((8, 80), (8, 128), (8, 256))
BATCH, GROUP, SLOTS, SINK_SLOTS = 2, 4, 16, 4


def variants() -> list[KernelVariant]:
    """bf16 models with padding, whose tokens are stored unchanged or rotated, with keys less an offset."""
    found = []
    for sizes, rotated in ((PLAIN, False), (ROTATED, True)):
        for heads, dim in sizes:
            name = f"append{'_rotated' * rotated}-d{dim}" + f"-h{heads}" * (heads != 8)
            found += [variant.named(name) for variant in record(_append, heads, dim, rotated)]
    return found


def _append(heads: int, dim: int, rotated: bool) -> None:
    window = torch.empty(BATCH, heads, SLOTS, dim, dtype=torch.bfloat16)
    new = torch.empty(BATCH, heads, dim, dtype=torch.bfloat16)
    extra = {}
    if rotated:
        matrix, query = torch.empty(dim, dim), torch.empty(BATCH, GROUP * heads, dim, dtype=torch.bfloat16)
        extra = {"query": query, "rotation": Rotation(matrix, matrix)}
    layout = PageLayout.build(Precision(8, 4), Precision(4, 2), dim, dim, 2)
    offset = torch.empty(BATCH, heads, dim if rotated else 0)
    rows = given_rows(layout, window, window, sink_slots=SINK_SLOTS, key_offset=offset)
    append_token(rows, new, new, limit=1.0, valid=torch.empty(BATCH, dtype=torch.bool), **extra)
