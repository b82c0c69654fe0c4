"""Prefix sums over many rows in two launches, as parts of other kernels (DiffKV, section 5: coordination).

The first kernel ranks the rows within its block and stores the block's total; the second, launched after it, adds the
totals of the blocks before. No program waits for another, so nothing depends on the order in which they run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_ranks(first, second):
    """Ranks two sets of rows of one block with a single scan.

    Args:
        first, second: bool [BLOCK], BLOCK at most 32768.

    Returns:
        For each set the rank of every row (int32 [BLOCK], how many True come before it) and the total (int32).
    """
    packed = first.to(tl.int32) | (second.to(tl.int32) << 16)
    inclusive = tl.cumsum(packed, 0)
    total = tl.sum(packed, 0)
    before = inclusive - packed
    return before & 0xFFFF, before >> 16, total & 0xFFFF, total >> 16


@triton.jit
def sum_totals(totals, block, blocks, CHUNK: tl.constexpr):
    """Sum of the totals (int32 [blocks]) of all blocks before `block`, and of all blocks."""
    lane = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    every = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < blocks:
        index = first + lane
        total = tl.load(totals + index, mask=index < blocks, other=0)
        before += tl.where(index < block, total, 0)
        every += total
        first += CHUNK
    return tl.sum(before, 0), tl.sum(every, 0)
