"""Triton kernels that round keys for the queries that read them (method: `reference.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import narrow_metadata, scale_and_zero
from ..quantize.kernels import round_even, tier_dims
from .reference import LARGEST_BITS

MOST_BITS = tl.constexpr(LARGEST_BITS)


@triton.jit
def group_numbers(low, high, BITS: tl.constexpr, METADATA: tl.constexpr):
    """Returns the float32 scale and zero point of groups with smallest and largest elements `low` and `high`."""
    LEVELS: tl.constexpr = 2**BITS - 1
    if METADATA == 2:
        return scale_and_zero(narrow_metadata(low, high, BITS), BITS)
    else:
        scale = tl.div_rn(high - low, tl.zeros_like(low) + LEVELS).to(tl.float16)
        return scale.to(tl.float32), low.to(tl.float16).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "parts", "query_batch", "query_head", "query_token"])
def moment_kernel(
    query, valid, moment, heads, group, tokens, parts, query_batch, query_head, query_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums q q^T over STEPS blocks of a row's queries. Grid: (rows, parts).

    Args:
        query: [batch, heads * group, tokens, DIM], with the given strides.
        valid: uint8 [batch, tokens], or None.
        moment: output, float32 [rows, parts, DIM, DIM].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    request, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    dim = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for step in range(STEPS):
        index = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        member, token = index // tokens, index % tokens
        there = index < group * tokens
        if valid is not None:
            there = there & (tl.load(valid + request * tokens + token, mask=there, other=0) != 0)
        rows = query + request * query_batch + (head * group + member) * query_head + token.to(tl.int64) * query_token
        some = tl.load(rows[:, None] + dim[None, :], mask=there[:, None] & (dim < DIM)[None, :], other=0.0).to(OPERAND)
        total = tl.dot(tl.trans(some), some, total, input_precision="ieee")
    place = (row.to(tl.int64) * parts + part) * (DIM * DIM) + dim[:, None] * DIM + dim[None, :]
    tl.store(moment + place, total, mask=(dim < DIM)[:, None] & (dim < DIM)[None, :])


@triton.jit
def feedback_kernel(moment, feedback, DAMPING: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Computes M^T of one row; `moment` and `feedback` are float32 [rows, DIM, DIM]. Grid: (rows,).

    A column of M is the damped moment's column after eliminating the columns before it, divided by its diagonal
    element.
    """
    place = tl.program_id(0).to(tl.int64) * (DIM * DIM)
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    left = tl.load(moment + place + row * DIM + column, mask=(row < DIM) & (column < DIM), other=0.0)
    mean = tl.sum(tl.sum(tl.where(row == column, left, 0.0), 1), 0) * (1.0 / DIM)
    # without queries, there is no feedback
    left += tl.where(row == column, tl.where(mean > 0.0, DAMPING * mean, 1.0), 0.0)
    dim = tl.arange(0, WIDTH)
    for channel in range(DIM):
        # the matrix is symmetric, so a row equals a column
        here = tl.sum(tl.where(row == channel, left, 0.0), 0)
        pivot = tl.sum(tl.where(dim == channel, here, 0.0), 0)
        weight = tl.where(dim >= channel, tl.div_rn(here, tl.zeros_like(here) + pivot), 0.0)
        tl.store(feedback + place + channel * DIM + dim, weight, mask=dim < DIM)
        weight = tl.where(dim > channel, weight, 0.0)
        left -= weight[:, None] * tl.where(dim > channel, here, 0.0)[None, :]


@triton.jit
def round_tile(x, dim, exists, matrix, TIER: tl.constexpr):
    """Returns a tile of keys of a tier rounded for quantisation.

    Args:
        x: keys, float32 [tokens, a, b].
        dim: channel of each element, [1, a, b].
        exists: True for elements that exist, [1, a, b].
        matrix: pointers [tokens or 1, a, b] to the first row of the feedback of each key's row.
    """
    DIM: tl.constexpr = TIER.key_dim
    GROUPS: tl.constexpr = TIER.k_groups
    LEVELS: tl.constexpr = 2**TIER.k_bits - 1
    low, high, step, zero = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    for group in tl.static_range(GROUPS):
        member = exists & (dim // (DIM // GROUPS) == group)
        least = tl.min(tl.min(tl.where(member, x, float("inf")), 2), 1)
        most = tl.max(tl.max(tl.where(member, x, float("-inf")), 2), 1)
        scale, zero_point = group_numbers(least, most, TIER.k_bits, TIER.key_metadata)
        low, high = tl.where(member, least[:, None, None], low), tl.where(member, most[:, None, None], high)
        step, zero = tl.where(member, scale[:, None, None], step), tl.where(member, zero_point[:, None, None], zero)
    # a scale of 0 has the single code 0
    top = tl.where(step == 0.0, 0.0, LEVELS)
    step = tl.where(step == 0.0, 1.0, step)
    least_code = tl.minimum(tl.maximum(round_even(tl.div_rn(low - zero, step)), 0.0), top)
    most_code = tl.minimum(tl.maximum(round_even(tl.div_rn(high - zero, step)), 0.0), top)
    is_low, is_high = x == low, x == high

    error, result = tl.zeros_like(x), x
    for index in range(DIM):
        channel = DIM - 1 - index
        weight = tl.load(matrix + channel * DIM, mask=exists & (dim > channel), other=0.0).to(tl.float32)
        behind = tl.sum(tl.sum(error * weight, 2), 1)[:, None, None]
        code = round_even(tl.div_rn(x - behind - zero, step))
        code = tl.minimum(tl.maximum(code, least_code), most_code)
        code = tl.where(is_low, least_code, tl.where(is_high, most_code, code))
        decoded = zero + code * step
        here = exists & (dim == channel)
        error = tl.where(here, decoded - x, error)
        kept = tl.where(is_low | is_high, x, tl.minimum(tl.maximum(decoded, low), high))
        result = tl.where(here, kept, result)
    return result


@triton.jit
def round_for_tier(x, matrix, TIER: tl.constexpr):
    """Returns a tile of keys of a tier (`tier_dims`) rounded for quantisation.

    `matrix` holds pointers to the first row of the feedback of each key's row: one, or [tokens, 1, 1].
    """
    dim, exists = tier_dims(TIER, True)
    return round_tile(x, dim, exists, matrix + dim, TIER)


@triton.jit(do_not_specialize=["count"])
def round_keys_kernel(
    key, row, feedback, rounded, count, key_stride, TIER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Rounds BLOCK keys for quantisation into `rounded`, float32 [count, DIM]. Grid: (cdiv(count, BLOCK),)."""
    DIM: tl.constexpr = TIER.key_dim
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    active = token < count
    dim = tl.arange(0, WIDTH)[None, None, :]
    there = active[:, None, None] & (dim < DIM)
    place = token.to(tl.int64)[:, None, None]
    x = tl.load(key + place * key_stride + dim, mask=there, other=0.0).to(tl.float32)
    matrix = feedback + tl.load(row + token, mask=active, other=0).to(tl.int64)[:, None, None] * (DIM * DIM) + dim
    x = round_tile(x, dim, dim < DIM, matrix, TIER)
    tl.store(rounded + place * DIM + dim, x, mask=there)
