"""Triton kernels that round keys for the queries that read them (method: `reference.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import narrow_metadata, scale_and_zero
from ..quantize.kernels import round_even
from .reference import LARGEST_BITS

MOST_BITS = tl.constexpr(LARGEST_BITS)


@triton.jit
def group_numbers(low, high, BITS: tl.constexpr, METADATA: tl.constexpr):
    """Returns scale and zero point, float32, of groups with smallest and largest elements `low` and `high`."""
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
        query: [batch, heads * group, tokens, DIM], with the strides given.
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

    A column of M is the damped moment's column after elimination of the columns before it, divided by its diagonal
    element.
    """
    place = tl.program_id(0).to(tl.int64) * (DIM * DIM)
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    left = tl.load(moment + place + row * DIM + column, mask=(row < DIM) & (column < DIM), other=0.0)
    mean = tl.sum(tl.sum(tl.where(row == column, left, 0.0), 1), 0) * (1.0 / DIM)
    # without queries there is no feedback
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
def round_tile(x, dim, exists, matrix, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
               METADATA: tl.constexpr):  # fmt: skip
    """Returns a tile of keys rounded for quantisation.

    Args:
        x: keys, float32 [tokens, a, b].
        dim: channel of each element, [1, a, b].
        exists: True for elements that exist, [1, a, b].
        matrix: pointers [tokens or 1, a, b] to the first row of the feedback of each key's row.
    """
    LEVELS: tl.constexpr = 2**BITS - 1
    low, high, step, zero = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    for group in tl.static_range(GROUPS):
        member = exists & (dim // (DIM // GROUPS) == group)
        least = tl.min(tl.min(tl.where(member, x, float("inf")), 2), 1)
        most = tl.max(tl.max(tl.where(member, x, float("-inf")), 2), 1)
        scale, zero_point = group_numbers(least, most, BITS, METADATA)
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
def block_dims(block, DIM: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns the channels of a block of a tile's elements, int32 [CHANNELS], and whether they exist."""
    element = block * CHANNELS + tl.arange(0, CHANNELS)
    byte = element % WIDTH
    return element // WIDTH * (DIM // PLANES) + byte, byte < DIM // PLANES


@triton.jit
def round_block(x, goal, ends, numbers, matrix, block, DIM: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr,
                LEVELS: tl.constexpr):  # fmt: skip
    """Rounds a block of channels, last one first.

    Args:
        x: a block of keys, float32 [tokens, channels].
        goal: the keys minus what later blocks feed back.
        ends, numbers: smallest and largest element, and scale and zero point, of each key, [tokens, 1] each.
        matrix: pointer to the feedback of the keys' row.

    Returns:
        Errors of the decoded codes, and keys for quantisation, both [tokens, channels].
    """
    CHANNELS: tl.constexpr = x.shape[1]
    dim, exists = block_dims(block, DIM, PLANES, WIDTH, CHANNELS)
    low, high = ends
    scale, zero = numbers
    # a scale of 0 has the single code 0
    top = tl.where(scale == 0.0, 0.0, LEVELS)
    step = tl.where(scale == 0.0, 1.0, scale)
    least = tl.minimum(tl.maximum(round_even(tl.div_rn(low - zero, step)), 0.0), top)
    most = tl.minimum(tl.maximum(round_even(tl.div_rn(high - zero, step)), 0.0), top)
    is_low, is_high = x == low, x == high
    floor, ceiling = tl.where(is_high & ~is_low, most, least), tl.where(is_low, least, most)
    step = step + tl.zeros_like(x)

    error, result = tl.zeros_like(x), tl.zeros_like(x)
    for index in range(CHANNELS):
        element = block * CHANNELS + CHANNELS - 1 - index
        # the result for elements that do not exist is not used
        channel = (element // WIDTH * (DIM // PLANES) + element % WIDTH) % DIM
        weight = tl.load(matrix + channel * DIM + dim, mask=exists, other=0.0)
        # channels that are not rounded yet have no error
        behind = tl.sum(error * weight.to(tl.float32)[None, :], 1)[:, None]
        code = tl.minimum(tl.maximum(round_even(tl.div_rn(goal - behind - zero, step)), floor), ceiling)
        decoded = zero + code * step
        here = (exists & (tl.arange(0, CHANNELS) == CHANNELS - 1 - index))[None, :]
        error = tl.where(here, decoded - x, error)
        result = tl.where(here, decoded, result)
    return error, tl.where(is_low | is_high, x, tl.minimum(tl.maximum(result, low), high))


@triton.jit
def split_dot(a, b):
    """Multiplies float32 matrices [m, k] and [k, n] in float16, each as the sum of two: 22 bits of both count."""
    a_high, b_high = a.to(tl.float16), b.to(tl.float16)
    a_low, b_low = (a - a_high.to(tl.float32)).to(tl.float16), (b - b_high.to(tl.float32)).to(tl.float16)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def round_row_tile(x, matrix, DIM: tl.constexpr, BITS: tl.constexpr, METADATA: tl.constexpr):
    """Returns a tile of one row's keys rounded for quantisation with one scale per key.

    The channels are rounded in blocks; a product feeds the errors of a block back to all earlier ones.

    Args:
        x: keys, float32 [tokens, planes, width] (`quantize/kernels.py`).
        matrix: pointer to the feedback of the keys' row.
    """
    TOKENS: tl.constexpr = x.shape[0]
    PLANES: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = x.shape[2]
    CHANNELS: tl.constexpr = min(16, PLANES * WIDTH)
    BLOCKS: tl.constexpr = PLANES * WIDTH // CHANNELS
    element = tl.arange(0, PLANES * WIDTH)
    dim, exists = block_dims(0, DIM, PLANES, WIDTH, PLANES * WIDTH)
    x = tl.reshape(x, (TOKENS, PLANES * WIDTH))
    low = tl.min(tl.where(exists[None, :], x, float("inf")), 1)
    high = tl.max(tl.where(exists[None, :], x, float("-inf")), 1)
    scale, zero = group_numbers(low, high, BITS, METADATA)
    ends, numbers = (low[:, None], high[:, None]), (scale[:, None], zero[:, None])
    x = tl.reshape(x, (TOKENS, BLOCKS, CHANNELS))
    goal, result = x, x
    for index in range(BLOCKS):
        block = BLOCKS - 1 - index
        mine = tl.arange(0, BLOCKS)[None, :, None] == block
        error, some = round_block(
            tl.sum(tl.where(mine, x, 0.0), 1), tl.sum(tl.where(mine, goal, 0.0), 1), ends, numbers, matrix, block,
            DIM, PLANES, WIDTH, 2**BITS - 1,
        )  # fmt: skip
        result = tl.where(mine, some[:, None, :], result)
        if BLOCKS > 1:
            own, real = block_dims(block, DIM, PLANES, WIDTH, CHANNELS)
            earlier = exists & (element < block * CHANNELS)
            spot = matrix + dim[:, None] * DIM + own[None, :]
            weight = tl.load(spot, mask=earlier[:, None] & real[None, :], other=0.0).to(tl.float32)
            goal -= tl.reshape(split_dot(error, tl.trans(weight)), (TOKENS, BLOCKS, CHANNELS))
    return tl.reshape(result, (TOKENS, PLANES, WIDTH))


@triton.jit(do_not_specialize=["count"])
def round_keys_kernel(
    key, row, feedback, rounded, count, key_stride,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, METADATA: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds BLOCK keys for quantisation into `rounded`, float32 [count, DIM]. Grid: (cdiv(count, BLOCK),)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    active = token < count
    dim = tl.arange(0, WIDTH)[None, None, :]
    there = active[:, None, None] & (dim < DIM)
    place = token.to(tl.int64)[:, None, None]
    x = tl.load(key + place * key_stride + dim, mask=there, other=0.0).to(tl.float32)
    matrix = feedback + tl.load(row + token, mask=active, other=0).to(tl.int64)[:, None, None] * (DIM * DIM) + dim
    x = round_tile(x, dim, dim < DIM, matrix, DIM, BITS, GROUPS, METADATA)
    tl.store(rounded + place * DIM + dim, x, mask=there)
