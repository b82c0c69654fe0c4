"""Block sizes of the prompt attention kernels per target.

Chosen from the compiled code, not from times: no variant spills registers, and the sm_80 table fits the 99 KiB of
shared memory of sm_86 and sm_89.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .kernels import flash_forward

TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tile:
    """Queries (m) and keys (n) of one step of a kernel, and its launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


INTERPRETER_TILE = Tile(64, 64, 4, 1)
# by the widest padded head dimension they serve
FORWARD_TILES = {
    "sm_80": {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 2), 256: Tile(64, 16, 8, 2)},
    "sm_90": {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
    "gfx942": {64: Tile(128, 64, 4, 1), 128: Tile(128, 32, 4, 1), 256: Tile(64, 64, 4, 1)},
}
COLUMN_TILES = {
    "sm_80": {64: Tile(64, 128, 4, 2), 128: Tile(32, 128, 4, 3), 256: Tile(32, 64, 4, 2)},
    "sm_90": {64: Tile(64, 128, 8, 3), 128: Tile(32, 128, 4, 3), 256: Tile(64, 128, 8, 2)},
    "gfx942": {64: Tile(64, 128, 4, 1), 128: Tile(64, 128, 4, 1), 256: Tile(64, 64, 4, 1)},
}
# reading a mask takes many registers
MASKED_TILES = {64: Tile(64, 64, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 2)}
# float32 dots have no matrix instructions and keep their operands in registers
FLOAT32_TILES = {64: Tile(32, 16, 4, 1), 128: Tile(32, 16, 8, 1), 256: Tile(16, 16, 4, 1)}


def target_of(device: torch.device) -> str:
    """The table to use on a device: `sm_80`, `sm_90`, `gfx942` or `interpreter`."""
    if not isinstance(flash_forward, triton.JITFunction):
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    # consumer parts of any generation have the shared memory of sm_86, which the sm_80 table respects
    return "sm_90" if torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3)) else "sm_80"


def padded(dim: int) -> int:
    """Columns of a tile: a power of two, at least what a dot takes."""
    return max(16, triton.next_power_of_2(dim))


def extent_block(length: int) -> int:
    """Tokens that `row_extents` reads at once."""
    return min(1024, max(64, triton.next_power_of_2(length)))


def forward_tile(target: str, dtype: torch.dtype, key_dim: int, value_dim: int, masked: bool = False) -> Tile:
    """Tile of `flash_forward`, `masked` if it reads a mask."""
    tables = dict.fromkeys(FORWARD_TILES, MASKED_TILES) if masked else FORWARD_TILES
    return _choose(tables, target, dtype, max(key_dim, value_dim))


def column_tile(target: str, dtype: torch.dtype, key_dim: int) -> Tile:
    """Tile of `column_scores`."""
    return _choose(COLUMN_TILES, target, dtype, key_dim)


def _choose(tables: dict[str, dict[int, Tile]], target: str, dtype: torch.dtype, dim: int) -> Tile:
    if target == "interpreter":
        return INTERPRETER_TILE
    table = FLOAT32_TILES if dtype == torch.float32 else tables[target]
    return table[max(64, padded(dim))]
