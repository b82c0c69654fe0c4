"""Many new tokens enter rows that keep every token, in order (Triton): pages without scores and positions.

    sum_keys       sums of the new keys, where some row may be centred (offset_kernels.py)
    fix_offsets    the rows' offsets, and what their windows are to be shifted by (the same)
    take_pages     page ids from the free list for what will leave the windows
    leave_window   tokens that were in a window are centred anew, and quantised where they leave it
    store_new      new tokens are rotated, centred, checked and quantised into their pages, or stay in the window
    advance        counts, lengths, windows and the free list follow

Token p of a request is in the window where p < sink_end or p >= start, and otherwise the (p - sink_end)-th of its row.
Rows are low where `alpha_high`, float32 [rows], is above 0; where there is one tier, it and `low_count` are None.
Rows are (request, head), tiles those of `quantize/kernels.py`, [tokens, planes, bytes of a plane]. Where nothing else
is said, `length`, `window_start` and `sink_end` are int64 [batch] as they were before these tokens, and `count` int64
[batch] says how many real ones there are, None for `tokens` of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...pages import pool
from ..compact.kernels import column
from ..quantize.kernels import padded_width, rows_at, stored_bits, tier_dims, write_tile
from ..rotation_kernel import rotated_tile, rounded
from ..rounding.kernels import MOST_BITS, round_tile

# what is of one layer, and so stands at any address
LENGTHS = ("length", "window_start", "sink_end")
ALPHA_AND_COUNTS = ("alpha_high", "high_count", "low_count")
START, FREE, CAPACITY = tl.constexpr(pool.START), tl.constexpr(pool.FREE), tl.constexpr(pool.CAPACITY)


@triton.jit
def new_start(count, length, window_start, request, there, tokens, window):
    """Where windows start once the new tokens are there, and how many tokens there are then; int64."""
    more = tokens
    if count is not None:
        more = tl.load(count + request, mask=there, other=0)
    total = tl.load(length + request, mask=there, other=0) + more
    return tl.maximum(tl.load(window_start + request, mask=there, other=0), total - window), total


@triton.jit
def is_low(alpha_high, row):
    """Whether a row is low; None, which is false when a kernel is compiled, where there is one tier."""
    low = None
    if alpha_high is not None:
        low = tl.load(alpha_high + row) > 0
    return low


@triton.jit
def low_rows(alpha_high, row, there):
    """Which rows are low."""
    low = tl.zeros_like(there)
    if alpha_high is not None:
        low = tl.load(alpha_high + row, mask=there, other=0.0) > 0
    return low


@triton.jit
def pages_of(tokens, low, HIGH_TOKENS: tl.constexpr, LOW_TOKENS: tl.constexpr):
    """Pages that so many tokens of each row take."""
    high_pages = (tokens + HIGH_TOKENS - 1) // HIGH_TOKENS
    if HIGH_TOKENS == LOW_TOKENS:
        pages = high_pages
    else:
        pages = tl.where(low, (tokens + LOW_TOKENS - 1) // LOW_TOKENS, high_pages)
    return pages


@triton.jit
def row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, row, there, heads, tokens,
               window, HIGH_TOKENS: tl.constexpr, LOW_TOKENS: tl.constexpr):  # fmt: skip
    """Tokens of rows once the new ones are there, the pages that they have, and those that they lack."""
    request = row // heads
    start, _ = new_start(count, length, window_start, request, there, tokens, window)
    after = (start - tl.load(sink_end + request, mask=there, other=0)).to(tl.int32)
    held = tl.load(high_count + row, mask=there, other=0)
    low = low_rows(alpha_high, row, there)
    if alpha_high is not None:
        held = tl.where(low, tl.load(low_count + row, mask=there, other=0), held)
    have = pages_of(held, low, HIGH_TOKENS, LOW_TOKENS)
    need = pages_of(after, low, HIGH_TOKENS, LOW_TOKENS)
    return after, have, tl.where(there, tl.maximum(need - have, 0), 0)


@triton.jit(do_not_specialize=["table", *ALPHA_AND_COUNTS, *LENGTHS, "rows", "heads", "width", "tokens", "window"])
def take_pages_kernel(
    ring, state, table, alpha_high, high_count, low_count, count, length, window_start, sink_end, rows, heads, width,
    tokens, window, HIGH_TOKENS: tl.constexpr, LOW_TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). The free list itself follows in `advance_kernel`, as all rows read where it starts."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < row:
        other = first + lane
        _, _, lacks = row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, other,
                                 other < row, heads, tokens, window, HIGH_TOKENS, LOW_TOKENS)  # fmt: skip
        before += lacks
        first += CHUNK
    one = row + tl.zeros((1,), tl.int32)
    _, have, lacks = row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, one,
                                one < rows, heads, tokens, window, HIGH_TOKENS, LOW_TOKENS)  # fmt: skip
    have, lacks = tl.sum(have, 0), tl.sum(lacks, 0)
    place = tl.load(state + START) + tl.sum(before, 0)
    capacity = tl.maximum(tl.load(state + CAPACITY), 1)
    step = 1
    if is_low(alpha_high, row):
        have, step = column(have, width, 1), -1
    base = table + row.to(tl.int64) * width + have
    taken = 0
    while taken < lacks:
        index = taken + lane
        page = tl.load(ring + (place + index) % capacity, mask=index < lacks, other=0)
        tl.store(base + step * index, page, mask=index < lacks)
        taken += CHUNK


@triton.jit(do_not_specialize=[*ALPHA_AND_COUNTS, *LENGTHS, "rows", "batch", "heads", "tokens", "window"])
def advance_kernel(
    state, alpha_high, high_count, low_count, count, length, window_start, sink_end, rows, batch, heads, tokens, window,
    HIGH_TOKENS: tl.constexpr, LOW_TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: every row reads what is written of its request in the end."""
    lane = tl.arange(0, CHUNK)
    taken = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < rows:
        row = first + lane
        there = row < rows
        after, _, lacks = row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, row,
                                     there, heads, tokens, window, HIGH_TOKENS, LOW_TOKENS)  # fmt: skip
        taken += lacks
        low = low_rows(alpha_high, row, there)
        if low_count is not None:
            tl.store(low_count + row, after, mask=there & low)
        tl.store(high_count + row, after, mask=there & ~low)
        first += CHUNK
    total = tl.sum(taken, 0)
    place, capacity = tl.load(state + START) + total, tl.maximum(tl.load(state + CAPACITY), 1)
    left = tl.load(state + FREE) - total
    tl.debug_barrier()
    tl.store(state + START, place % capacity)
    tl.store(state + FREE, left)
    first = 0
    while first < batch:
        request = first + lane
        there = request < batch
        start, end = new_start(count, length, window_start, request, there, tokens, window)
        tl.store(length + request, end, mask=there)
        tl.store(window_start + request, start, mask=there)
        first += CHUNK


@triton.jit
def new_tile(rows, active, matrix, limit, ROOT: tl.constexpr, TIER: tl.constexpr, IS_KEY: tl.constexpr,
             INNER: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Rotates tokens: a tile in float32, and whether each may be stored. Arguments as in `rotated_tile`.

    Args:
        matrix: contiguous, or None.
        limit: none of a token's elements may be larger, rotated or not; where it is rotated, its norm decides.
    """
    if matrix is None:
        dim, exists = tier_dims(TIER, IS_KEY)
        x = tl.load(rows[:, None, None] + dim, mask=active[:, None, None] & exists, other=0.0).to(tl.float32)
        # a comparison with NaN is false
        wrong = exists & ~(tl.abs(x) <= limit)
        good = tl.sum(tl.sum(wrong.to(tl.int32), 2), 1) == 0
    else:
        DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
        BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
        WIDTH: tl.constexpr = padded_width(DIM, BITS)
        x, squares = rotated_tile(rows, active, matrix, DIM, 1, ROOT, DIM, BITS, WIDTH, INNER, OPERAND)
        good = squares <= limit * limit
    return x, good


@triton.jit
def page_tile(x, pages, number, place, leaves, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr):
    """Quantises a tile of keys or values to the slots `place` of the pages `number`, int64 [tokens] each."""
    codes, metadata = rows_at(pages + number * TIER.page_bytes, place, TIER, IS_KEY)
    write_tile(x, codes, metadata, leaves, TIER, IS_KEY, DTYPE)


@triton.jit
def stored_key(x, pages, number, place, feedback, row, leaves, TIER: tl.constexpr, DTYPE: tl.constexpr):
    """Quantises a tile of keys of one row, rounded by `feedback` where that is given and bits are few."""
    if feedback is not None and TIER.k_bits <= MOST_BITS:
        dim, exists = tier_dims(TIER, True)
        matrix = feedback + row.to(tl.int64) * (TIER.key_dim * TIER.key_dim) + dim
        x = round_tile(x, dim, exists, matrix, TIER.key_dim, TIER.k_bits, TIER.k_groups, TIER.key_metadata)
    page_tile(x, pages, number, place, leaves, TIER, True, DTYPE)


@triton.jit
def window_tile(window, window_row, active, TIER: tl.constexpr, IS_KEY: tl.constexpr):
    """A tile of what windows hold, [rows * slots, DIM]; window_row: int64 [tokens]."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    dim, exists = tier_dims(TIER, IS_KEY)
    mask = active[:, None, None] & exists
    return tl.load(window + window_row[:, None, None] * DIM + dim, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def less(x, offset, row, TIER: tl.constexpr):
    """A tile of keys of one row less its offset, float32 [rows, key_dim]."""
    dim, exists = tier_dims(TIER, True)
    return x - tl.load(offset + row.to(tl.int64) * TIER.key_dim + dim, mask=exists, other=0.0)


@triton.jit
def keep_tile(x, window, window_row, stays, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr):
    """Writes a tile to the window, [rows * slots, DIM]; window_row: int64 [tokens]."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    dim, exists = tier_dims(TIER, IS_KEY)
    bits = stored_bits(x, DTYPE)
    pointer = window.to(tl.pointer_type(bits.dtype)) + window_row[:, None, None] * DIM + dim
    tl.store(pointer, bits, mask=stays[:, None, None] & exists)


@triton.jit
def page_of(table, row, width, index, leaves, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Page and slot of a row's tokens `index`, int64 [tokens]."""
    entry = table + row.to(tl.int64) * width + column(index // TIER.capacity, width, IS_LOW)
    return tl.load(entry, mask=leaves, other=0).to(tl.int64), index % TIER.capacity


@triton.jit
def new_tokens(token, rank, count, length, window_start, sink_end, request, tokens, window):
    """Which of a row's new tokens are real, their positions, where sinks end, and which of them stay in the window;
    arguments as in `store_new_kernel`."""
    order = token
    real = token < tokens
    if rank is not None:
        order = tl.load(rank + request * tokens + token, mask=real, other=-1)
        real = real & (order >= 0)
    start, _ = new_start(count, length, window_start, request, True, tokens, window)
    sinks = tl.load(sink_end + request)
    position = tl.load(length + request) + order
    return real, position, sinks, real & ((position < sinks) | (position >= start))


@triton.jit
def slot_of(position, sinks, row, slots, sink_slots):
    """Slots of tokens among those of all windows, int64."""
    slot = tl.where(position < sinks, position, sink_slots + position % (slots - sink_slots))
    return slot + row.to(tl.int64) * slots


@triton.jit
def enter_tile(
    pages, table, window_key, window_value, window_score, invalid, key, value, key_matrix, value_matrix, offset,
    feedback, limit, token, real, position, sinks, stays, request, head, row, width, slots,
    sink_slots, key_batch, key_head, key_token, value_batch, value_head, value_token,
    TIER: tl.constexpr, IS_LOW: tl.constexpr, KEY_ROOT: tl.constexpr, VALUE_ROOT: tl.constexpr, INNER: tl.constexpr,
    DTYPE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A tile of a row's new tokens goes to the row's tier, or stays in the window.

    Args:
        token: of the new ones; real, position, sinks, stays: as of `new_tokens`. Others as in `store_new_kernel`.
    """
    leaves = real & ~stays
    number, place = page_of(table, row, width, position - sinks, leaves, TIER, IS_LOW)
    slot = slot_of(position, sinks, row, slots, sink_slots)

    rows = key + request * key_batch + head * key_head + token.to(tl.int64) * key_token
    x, good = new_tile(rows, real, key_matrix, limit, KEY_ROOT, TIER, True, INNER, OPERAND)
    if offset is not None:
        x = less(x, offset, row, TIER)
    x = rounded(x, DTYPE)
    keep_tile(x, window_key, slot, stays, TIER, True, DTYPE)
    stored_key(x, pages, number, place, feedback, row, leaves, TIER, DTYPE)

    rows = value + request * value_batch + head * value_head + token.to(tl.int64) * value_token
    x, fine = new_tile(rows, real, value_matrix, limit, VALUE_ROOT, TIER, False, INNER, OPERAND)
    x = rounded(x, DTYPE)
    page_tile(x, pages, number, place, leaves, TIER, False, DTYPE)
    keep_tile(x, window_value, slot, stays, TIER, False, DTYPE)
    tl.store(window_score + slot, tl.zeros(slot.shape, tl.float32), mask=stays)
    wrong = tl.sum((real & ~(good & fine)).to(tl.int32), 0)
    tl.store(invalid, 1, mask=wrong > 0)


@triton.jit(
    do_not_specialize=[
        *("table", "alpha_high", "window_score", *LENGTHS),
        *("rank", "count", "heads", "width", "tokens", "window", "slots", "sink_slots"),
        *("key_batch", "key_head", "key_token", "value_batch", "value_head", "value_token"),
    ]
)
def store_new_kernel(
    pages, table, alpha_high, window_key, window_value, window_score, length, window_start, sink_end, invalid, key,
    value, rank, count, key_matrix, value_matrix, offset, feedback, limit, heads, width, tokens, window, slots,
    sink_slots, key_batch, key_head, key_token, value_batch, value_head, value_token,
    HIGH: tl.constexpr, LOW: tl.constexpr, KEY_ROOT: tl.constexpr, VALUE_ROOT: tl.constexpr, INNER: tl.constexpr,
    DTYPE: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, cdiv(tokens, BLOCK)).

    Args:
        key, value: [batch, heads, tokens, dim] of the model, with the strides given.
        rank: int32 [batch, tokens], how many real tokens come before each, -1 for padding; None where all are real.
        offset: float32 [rows, key_dim], what keys are held less by, or None. invalid: uint8 [1].
        feedback: float32 [rows, key_dim, key_dim] that keys are rounded with (ops/rounding), or None.
    """
    row = tl.program_id(0)
    request, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, position, sinks, stays = new_tokens(
        token, rank, count, length, window_start, sink_end, request, tokens, window
    )
    if is_low(alpha_high, row):
        enter_tile(
            pages, table, window_key, window_value, window_score, invalid, key, value, key_matrix, value_matrix, offset,
            feedback, limit, token, real, position, sinks, stays, request, head, row, width, slots,
            sink_slots, key_batch, key_head, key_token, value_batch, value_head, value_token,
            LOW, 1, KEY_ROOT, VALUE_ROOT, INNER, DTYPE, OPERAND,
        )  # fmt: skip
    else:
        enter_tile(
            pages, table, window_key, window_value, window_score, invalid, key, value, key_matrix, value_matrix, offset,
            feedback, limit, token, real, position, sinks, stays, request, head, row, width, slots,
            sink_slots, key_batch, key_head, key_token, value_batch, value_head, value_token,
            HIGH, 0, KEY_ROOT, VALUE_ROOT, INNER, DTYPE, OPERAND,
        )  # fmt: skip


@triton.jit
def leave_tile(
    pages, table, window_key, window_value, slot, token, there, leaves, sinks, shift, feedback, row, width, slots,
    TIER: tl.constexpr, IS_LOW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What leaves of a tile of a row's window goes to the row's tier.

    Args:
        slot: of the window; token, there: as of `token_in_slot`. Others as in `leave_window_kernel`.
    """
    number, place = page_of(table, row, width, token - sinks, leaves, TIER, IS_LOW)
    window_row = slot + row.to(tl.int64) * slots

    x = window_tile(window_key, window_row, there, TIER, True)
    if shift is not None:
        x = rounded(less(x, shift, row, TIER), DTYPE)
        keep_tile(x, window_key, window_row, there & ~leaves, TIER, True, DTYPE)
    stored_key(x, pages, number, place, feedback, row, leaves, TIER, DTYPE)
    x = window_tile(window_value, window_row, leaves, TIER, False)
    page_tile(x, pages, number, place, leaves, TIER, False, DTYPE)


@triton.jit(
    do_not_specialize=[
        *("table", "alpha_high", *LENGTHS),
        *("count", "heads", "width", "tokens", "window", "slots", "sink_slots"),
    ]
)
def leave_window_kernel(
    pages, table, alpha_high, window_key, window_value, length, window_start, sink_end, count, shift,
    feedback, heads, width, tokens, window, slots, sink_slots,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, cdiv(slots, BLOCK)). shift: float32 [rows, key_dim], what is taken off all keys that were in the
    window, or None; feedback: as in `store_new_kernel`."""
    row = tl.program_id(0)
    request = row // heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(length + request)
    before = tl.load(window_start + request)
    sinks = tl.load(sink_end + request)
    start, _ = new_start(count, length, window_start, request, True, tokens, window)
    token, there = token_in_slot(slot, before, held, sinks, sink_slots, slots)
    leaves = there & (token >= sinks) & (token < start)
    if is_low(alpha_high, row):
        leave_tile(pages, table, window_key, window_value, slot, token, there, leaves, sinks, shift, feedback, row,
                   width, slots, LOW, 1, DTYPE)  # fmt: skip
    else:
        leave_tile(pages, table, window_key, window_value, slot, token, there, leaves, sinks, shift, feedback, row,
                   width, slots, HIGH, 0, DTYPE)  # fmt: skip


@triton.jit
def token_in_slot(slot, start, length, sink_end, sink_slots, slots):
    """The token in each slot of a window, int64, and whether there is one; see `pages/rows.py`."""
    ring = slots - sink_slots
    back = (length - 1 - (slot - sink_slots)) % ring
    back = tl.where(back < 0, back + ring, back)
    token = tl.where(slot < sink_slots, slot, length - 1 - back)
    there = tl.where(slot < sink_slots, slot < tl.minimum(length, sink_end), token >= start)
    return token, there & (slot < slots)
