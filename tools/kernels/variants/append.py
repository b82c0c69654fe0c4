"""What the ahead-of-time report compiles of the append kernel."""

from __future__ import annotations

import torch

from hf_diffkv.ops.append.launch import Rotation, append_token
from tools.kernels.record import record
from tools.kernels.variant import KernelVariant

# KV heads and head_dim
PLAIN = ((8, 80), (8, 128), (32, 128), (8, 512))
ROTATED = ((8, 80), (8, 128), (8, 256))
BATCH, GROUP, SLOTS, SINK_SLOTS = 2, 4, 16, 4


def variants() -> list[KernelVariant]:
    """bf16 models with padding, whose tokens are stored as they are or rotated, keys less an offset."""
    found = []
    for sizes, rotated in ((PLAIN, False), (ROTATED, True)):
        for heads, dim in sizes:
            name = f"append{'_rotated' * rotated}-d{dim}" + f"-h{heads}" * (heads != 8)
            found += [variant.named(name) for variant in record(_append, heads, dim, rotated)]
    return found


def _append(heads: int, dim: int, rotated: bool) -> None:
    window = torch.empty(BATCH, heads, SLOTS, dim, dtype=torch.bfloat16)
    new = torch.empty(BATCH, heads, dim, dtype=torch.bfloat16)
    length = torch.empty(BATCH, dtype=torch.int64)
    extra = {}
    if rotated:
        matrix = torch.empty(dim, dim)
        extra = {
            "query": torch.empty(BATCH, GROUP * heads, dim, dtype=torch.bfloat16),
            "rotation": Rotation(matrix, matrix, torch.empty(BATCH, heads, dim)),
        }
    append_token(
        window,
        window,
        torch.empty(BATCH, heads, SLOTS),
        length,
        torch.empty((), dtype=torch.bool),
        new,
        new,
        limit=1.0,
        valid=torch.empty(BATCH, dtype=torch.bool),
        sink_end=length,
        sink_slots=SINK_SLOTS,
        **extra,
    )
