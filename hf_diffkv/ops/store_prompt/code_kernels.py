"""Triton kernel that rounds the keys of a prompt for the queries that read them (method: `rounding/reference.py`).

Tiles are [channels, tokens], and a program is one warp, so that a sum over channels stays within it. In the kernel that
stores keys, channels are spread over warps, and every sum over them would wait for all warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize.kernels import round_even
from ..rounding.kernels import MOST_BITS, group_numbers
from .order_kernels import is_low
from .row_kernels import row_and_place


@triton.jit
def round_group(goal, ends, key, matrix, codes, place, there, dim, first, TIER: tl.constexpr):
    """Chooses the codes of one group of channels, starting at `first`; returns `goal` for the channels before it.

    Args:
        ends: smallest and largest element of each key in the group, [tokens] each.
        place: offsets of the tokens in `key` and `codes`.
    """
    LEVELS: tl.constexpr = 2**TIER.k_bits - 1
    GROUP_DIM: tl.constexpr = TIER.key_dim // TIER.k_groups
    low, high = ends
    scale, zero = group_numbers(low, high, TIER.k_bits, TIER.key_metadata)
    # a scale of 0 has the single code 0
    top = tl.where(scale == 0.0, 0.0, LEVELS)
    step = tl.where(scale == 0.0, 1.0, scale)
    least = tl.minimum(tl.maximum(round_even(tl.div_rn(low - zero, step)), 0.0), top)
    most = tl.minimum(tl.maximum(round_even(tl.div_rn(high - zero, step)), 0.0), top)
    for index in range(GROUP_DIM):
        channel = first + GROUP_DIM - 1 - index
        exact = tl.load(key + place + channel, mask=there, other=0.0).to(tl.float32)
        wanted = tl.sum(tl.where((dim == channel)[:, None], goal, 0.0), 0)
        # the ends of the range have one possible code
        least_code = tl.where((exact == high) & (exact != low), most, least)
        most_code = tl.where(exact == low, least, most)
        code = tl.minimum(tl.maximum(round_even(tl.div_rn(wanted - zero, step)), least_code), most_code)
        tl.store(codes + place + channel, code.to(tl.int32).to(tl.uint8), mask=there)
        error = zero + code * step - exact
        weight = tl.load(matrix + channel * TIER.key_dim + dim, mask=dim < channel, other=0.0).to(tl.float32)
        goal -= weight[:, None] * error[None, :]
    return goal


@triton.jit
def store_codes(key, matrix, codes, token, there, TIER: tl.constexpr, WIDTH: tl.constexpr):
    """Chooses the codes of a tile of one row's keys, channel by channel, from last to first.

    Args:
        key, codes: pointers to the row's first token.
        matrix: pointer to the row's transposed feedback.
    """
    DIM: tl.constexpr = TIER.key_dim
    GROUPS: tl.constexpr = TIER.k_groups
    GROUP_DIM: tl.constexpr = DIM // GROUPS
    dim = tl.arange(0, WIDTH)
    exists = (dim < DIM)[:, None]
    place = token.to(tl.int64) * DIM
    # the keys minus the errors that rounded channels feed back
    goal = tl.load(key + place[None, :] + dim[:, None], mask=exists & there[None, :], other=0.0).to(tl.float32)
    ranges = ()
    for group in tl.static_range(GROUPS):
        member = exists & (dim // GROUP_DIM == group)[:, None]
        low = tl.min(tl.where(member, goal, float("inf")), 0)
        ranges = ranges + ((low, tl.max(tl.where(member, goal, float("-inf")), 0)),)
    for group in tl.static_range(GROUPS - 1, -1, -1):
        goal = round_group(goal, ranges[group], key, matrix, codes, place, there, dim, group * GROUP_DIM, TIER)


@triton.jit(do_not_specialize=["alpha_high", "tokens"])
def choose_codes_kernel(
    key, alpha_high, matrix, codes, tokens,
    HIGH: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Chooses the codes of a prompt's keys. Grid: (cdiv(tokens, BLOCK), heads, batch).

    Args:
        key: keys in the store's form, contiguous [rows, tokens, key_dim].
        matrix: transposed feedback, float32 [rows, key_dim, key_dim].
        codes: output, uint8 [rows, tokens, key_dim]; unset in rows whose keys have too many bits.
    """
    row, token = row_and_place(BLOCK)
    first = row.to(tl.int64) * tokens * HIGH.key_dim
    square = matrix + row.to(tl.int64) * (HIGH.key_dim * HIGH.key_dim)
    if is_low(alpha_high, row):
        if LOW.k_bits <= MOST_BITS:
            store_codes(key + first, square, codes + first, token, token < tokens, LOW, WIDTH)
    else:
        if HIGH.k_bits <= MOST_BITS:
            store_codes(key + first, square, codes + first, token, token < tokens, HIGH, WIDTH)
