"""Block sizes of the prompt attention kernels per target.

They are chosen from compiled code, not from timings: no variant spills registers, and the sm_80 table fits the 99 KiB
of shared memory of sm_86 and sm_89.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from ...pages import PageLayout
from ..backend import INTERPRETER
from ..decode_attention.tier_math import padded
from ..dequant import PORTABLE, PTX, pieces
from ..quantize.launch import dot_dtype


@dataclass(frozen=True)
class Tile:
    """Queries (m) and keys (n) per step of a kernel, and its launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Returns launch options and block sizes as kernel arguments."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return blocks | {"num_warps": self.num_warps, "num_stages": self.num_stages}


INTERPRETER_TILE = Tile(64, 64, 4, 1)
# tiles by the widest padded head dimension they serve
FORWARD_TILES = {
    "sm_80": {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 2), 256: Tile(64, 16, 8, 2), 512: Tile(32, 32, 8, 1)},
    "sm_90": {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2), 512: Tile(32, 32, 8, 2)},
    "gfx942": {64: Tile(128, 64, 4, 1), 128: Tile(128, 32, 4, 1), 256: Tile(64, 64, 4, 1), 512: Tile(32, 16, 4, 1)},
}
COLUMN_TILES = {
    "sm_80": {64: Tile(64, 128, 4, 2), 128: Tile(32, 128, 4, 3), 256: Tile(32, 64, 4, 2), 512: Tile(32, 64, 8, 2)},
    "sm_90": {64: Tile(64, 128, 8, 3), 128: Tile(32, 128, 4, 3), 256: Tile(64, 128, 8, 2), 512: Tile(32, 64, 8, 2)},
    "gfx942": {64: Tile(64, 128, 4, 1), 128: Tile(64, 128, 4, 1), 256: Tile(64, 64, 4, 1), 512: Tile(64, 64, 4, 1)},
}
# tiles of `past_forward`
PAST_TILES = {
    "sm_80": {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 1), 512: Tile(32, 32, 8, 1)},
    "sm_90": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 1), 512: Tile(32, 64, 8, 1)},
    # on sm_100, Triton 3.6 does not overlap inline PTX with matrix products
    "sm_100": {64: Tile(128, 64, 8, 1), 128: Tile(128, 64, 8, 1), 256: Tile(128, 32, 8, 1), 512: Tile(32, 64, 8, 1)},
    "gfx942": {64: Tile(128, 64, 4, 1), 128: Tile(128, 32, 4, 1), 256: Tile(64, 32, 4, 1), 512: Tile(64, 16, 4, 1)},
}
# reading a mask takes many registers
_MASKED = {64: Tile(64, 64, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 2), 512: Tile(16, 32, 8, 1)}
# Triton 3.6 does not compile 32 queries over a past for AMD
MASKED_TILES = {
    "sm_80": _MASKED,
    "sm_90": _MASKED,
    "gfx942": _MASKED | {256: Tile(64, 16, 8, 1), 512: Tile(32, 16, 8, 1)},
}
# float32 dots use no matrix instructions and keep their operands in registers
FLOAT32_TILES = {64: Tile(32, 16, 4, 1), 128: Tile(32, 16, 8, 1), 256: Tile(16, 16, 4, 1), 512: Tile(16, 16, 4, 1)}


def value_width(key_dim: int, value_dim: int) -> int:
    """Returns the number of columns of a tile of values.

    On an H200, Triton 3.6 multiplied values of 16 or 32 columns wrongly, or read beyond them, after keys of 64 or more.
    """
    return max(padded(value_dim), min(64, padded(key_dim)))


def extent_block(length: int) -> int:
    """Returns the number of tokens that `row_extents` reads at once."""
    return min(1024, max(64, triton.next_power_of_2(length)))


def forward_tile(target: str, dtype: torch.dtype, key_dim: int, value_dim: int, masked: bool = False) -> Tile:
    """Returns the tile of `flash_forward`; `masked` if it reads a mask."""
    return _choose(MASKED_TILES if masked else FORWARD_TILES, target, dtype, max(key_dim, value_dim))


def past_tile(target: str, dtype: torch.dtype, layout: PageLayout) -> Tile:
    """Returns the tile of `past_forward`."""
    tile = _choose(PAST_TILES, target, dtype, max(layout.high.key_dim, layout.high.value_dim))
    sides = [(tier.k_bits, tier.k_groups) for tier in (layout.high, layout.low)]
    sides += [(tier.v_bits, tier.v_groups) for tier in (layout.high, layout.low)]
    if any(bits < 16 and pieces(bits) % groups for bits, groups in sides):
        # metadata is then loaded for each element, which is too much to keep for several steps
        tile = replace(tile, num_stages=1)
    return tile


def column_tile(target: str, dtype: torch.dtype, key_dim: int) -> Tile:
    """Returns the tile of `column_scores`."""
    return _choose(COLUMN_TILES, target, dtype, key_dim)


def past_constants(layout: PageLayout, dtype: torch.dtype, target: str) -> dict[str, object]:
    """Returns the widths and arithmetic of `past_forward` as kernel constants."""
    tiers = (layout.high, layout.low)
    key_parts = max(pieces(tier.k_bits) for tier in tiers)
    value_parts = max(pieces(tier.v_bits) for tier in tiers)
    key_dim, value_dim = layout.high.key_dim, layout.high.value_dim
    widths = padded(key_dim), value_width(key_dim, value_dim)
    # the PTX code processes four bytes at once
    narrow = min(widths[0] // key_parts, widths[1] // value_parts) < 4
    portable = dtype == torch.float32 or narrow or not target.startswith("sm_")
    return {
        "KEY_WIDTH": widths[0],
        "VALUE_WIDTH": widths[1],
        "KEY_PARTS": key_parts,
        "VALUE_PARTS": value_parts,
        "DOT": dot_dtype(past_dot(layout, dtype), target),
        "MODE": PORTABLE if portable else PTX,
    }


def past_dot(layout: PageLayout, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which `past_forward` multiplies.

    It is fp16, which is exact for codes, if compression keeps stored numbers within its range.
    """
    tiers = (layout.high, layout.low)
    uncompressed = all(bits == 16 for tier in tiers for bits in (tier.k_bits, tier.v_bits))
    return dtype if uncompressed or dtype == torch.float32 else torch.float16


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Returns the strides of [batch, heads, tokens, dim] as kernel arguments; 0 along axes of size 1."""
    steps = [step if size > 1 else 0 for step, size in zip(x.stride(), x.shape)]
    return {f"{name}_batch": steps[0], f"{name}_head": steps[1], f"{name}_token": steps[2]}


def _choose(tables: dict[str, dict[int, Tile]], target: str, dtype: torch.dtype, dim: int) -> Tile:
    if target == INTERPRETER:
        return INTERPRETER_TILE
    if target not in tables and target == "sm_100":
        target = "sm_90"
    table = FLOAT32_TILES if dtype == torch.float32 else tables[target]
    return table[max(64, padded(dim))]
