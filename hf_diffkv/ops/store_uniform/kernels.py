"""Triton kernels that store many new tokens in order, in pages without scores and positions.

    sum_keys       sums the new keys, if a row may be centred (offset_kernels.py)
    fix_offsets    fixes the rows' offsets, and computes the shift of their windows (offset_kernels.py)
    take_pages     takes page ids from the free list for the tokens that leave the windows
    leave_window   centres the tokens of the windows, and quantises those that leave
    store_new      rotates, centres and checks new tokens, and quantises them into pages or keeps them in the window
    advance        updates counts, lengths, windows and the free list

Token p of a request is in the window if p < sink_end or p >= start; otherwise it is the (p - sink_end)-th token of its
row. A row is low if `alpha_high`, float32 [rows], is above 0. With one tier, `alpha_high` and `low_count` are None.
Rows are (request, head). Tiles are [tokens, planes, bytes of a plane], as in `quantize/kernels.py`. Unless stated
otherwise, `length`, `window_start` and `sink_end` are int64 [batch], with the values before the new tokens, and `count`
is the number of new real tokens, int64 [batch], or None if all `tokens` are real.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...pages import pool
from ..compact.kernels import column
from ..quantize.kernels import padded_width, rows_at, stored_bits, tier_dims, write_tile
from ..rotation_kernel import rotated_tile, rounded
from ..rounding.kernels import MOST_BITS, round_tile

# arguments of one layer, whose addresses may have any alignment
LENGTHS = ("length", "window_start", "sink_end")
ALPHA_AND_COUNTS = ("alpha_high", "high_count", "low_count")
START, FREE, CAPACITY = tl.constexpr(pool.START), tl.constexpr(pool.FREE), tl.constexpr(pool.CAPACITY)


@triton.jit
def new_start(count, length, window_start, request, there, tokens, window):
    """Returns the windows' start and the requests' length including the new tokens, int64."""
    more = tokens
    if count is not None:
        more = tl.load(count + request, mask=there, other=0)
    total = tl.load(length + request, mask=there, other=0) + more
    return tl.maximum(tl.load(window_start + request, mask=there, other=0), total - window), total


@triton.jit
def is_low(alpha_high, row):
    """Returns whether a row is low; None with one tier, which compiles as False."""
    low = None
    if alpha_high is not None:
        low = tl.load(alpha_high + row) > 0
    return low


@triton.jit
def low_rows(alpha_high, row, there):
    """Returns a mask of the low rows."""
    low = tl.zeros_like(there)
    if alpha_high is not None:
        low = tl.load(alpha_high + row, mask=there, other=0.0) > 0
    return low


@triton.jit
def pages_of(tokens, low, HIGH_TOKENS: tl.constexpr, LOW_TOKENS: tl.constexpr):
    """Returns the number of pages that `tokens` tokens of each row take."""
    high_pages = (tokens + HIGH_TOKENS - 1) // HIGH_TOKENS
    if HIGH_TOKENS == LOW_TOKENS:
        pages = high_pages
    else:
        pages = tl.where(low, (tokens + LOW_TOKENS - 1) // LOW_TOKENS, high_pages)
    return pages


@triton.jit
def row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, row, there, heads, tokens,
               window, HIGH_TOKENS: tl.constexpr, LOW_TOKENS: tl.constexpr):  # fmt: skip
    """Returns the rows' stored tokens including the new ones, the pages they have, and the pages they lack."""
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
    """Takes the pages that rows lack. Grid: (rows,).

    The free list is updated by `advance_kernel`, because all rows read its start.
    """
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
    """Updates counts, lengths, windows and the free list, in one program.

    One program, because all rows read the lengths of their request, which are written last.
    """
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
    """Loads and rotates tokens; returns a float32 tile and whether each token can be stored.

    Further arguments as in `rotated_tile`.

    Args:
        matrix: contiguous rotation, or None.
        limit: largest magnitude of an element; with a rotation, largest norm of a token.
    """
    if matrix is None:
        dim, exists = tier_dims(TIER, IS_KEY)
        x = tl.load(rows[:, None, None] + dim, mask=active[:, None, None] & exists, other=0.0).to(tl.float32)
        # NaN fails the comparison
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
    """Quantises a tile of keys or values into the slots `place` of the pages `number`, int64 [tokens] each."""
    codes, metadata = rows_at(pages + number * TIER.page_bytes, place, TIER, IS_KEY)
    write_tile(x, codes, metadata, leaves, TIER, IS_KEY, DTYPE)


@triton.jit
def stored_key(x, pages, number, place, feedback, row, leaves, TIER: tl.constexpr, DTYPE: tl.constexpr):
    """Quantises a tile of keys of one row, rounded by `feedback` if it is given and the keys have few bits."""
    if feedback is not None and TIER.k_bits <= MOST_BITS:
        dim, exists = tier_dims(TIER, True)
        matrix = feedback + row.to(tl.int64) * (TIER.key_dim * TIER.key_dim) + dim
        x = round_tile(x, dim, exists, matrix, TIER.key_dim, TIER.k_bits, TIER.k_groups, TIER.key_metadata)
    page_tile(x, pages, number, place, leaves, TIER, True, DTYPE)


@triton.jit
def window_tile(window, window_row, active, TIER: tl.constexpr, IS_KEY: tl.constexpr):
    """Loads a tile of the windows, [rows * slots, DIM]; `window_row` is int64 [tokens]."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    dim, exists = tier_dims(TIER, IS_KEY)
    mask = active[:, None, None] & exists
    return tl.load(window + window_row[:, None, None] * DIM + dim, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def less(x, offset, row, TIER: tl.constexpr):
    """Subtracts a row's offset, float32 [rows, key_dim], from a tile of its keys."""
    dim, exists = tier_dims(TIER, True)
    return x - tl.load(offset + row.to(tl.int64) * TIER.key_dim + dim, mask=exists, other=0.0)


@triton.jit
def keep_tile(x, window, window_row, stays, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr):
    """Writes a tile to the windows, [rows * slots, DIM]; `window_row` is int64 [tokens]."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    dim, exists = tier_dims(TIER, IS_KEY)
    bits = stored_bits(x, DTYPE)
    pointer = window.to(tl.pointer_type(bits.dtype)) + window_row[:, None, None] * DIM + dim
    tl.store(pointer, bits, mask=stays[:, None, None] & exists)


@triton.jit
def page_of(table, row, width, index, leaves, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns page and slot of a row's tokens `index`, int64 [tokens]."""
    entry = table + row.to(tl.int64) * width + column(index // TIER.capacity, width, IS_LOW)
    return tl.load(entry, mask=leaves, other=0).to(tl.int64), index % TIER.capacity


@triton.jit
def new_tokens(token, rank, count, length, window_start, sink_end, request, tokens, window):
    """Returns which of a row's new tokens are real, their positions, the sinks' end, and which stay in the window.

    Arguments as in `store_new_kernel`.
    """
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
    """Returns the slots of tokens among the slots of all windows, int64."""
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
    """Stores a tile of a row's new tokens in the row's tier or in the window.

    Further arguments as in `store_new_kernel`.

    Args:
        token: index of each token among the new ones.
        real, position, sinks, stays: results of `new_tokens`.
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
    """Stores new tokens in pages or in the window. Grid: (rows, cdiv(tokens, BLOCK)).

    Args:
        key, value: key and value states of the model, [batch, heads, tokens, dim], with the strides given.
        rank: number of real tokens before each, int32 [batch, tokens], -1 for padding; None if all are real.
        offset: offset to subtract from keys, float32 [rows, key_dim], or None.
        invalid: flag set if a token cannot be stored, uint8 [1].
        feedback: matrices by which keys are rounded (ops/rounding), float32 [rows, key_dim, key_dim], or None.
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
    """Stores the leaving tokens of a tile of a row's window in the row's tier.

    Further arguments as in `leave_window_kernel`.

    Args:
        slot: slots of the window.
        token, there: results of `token_in_slot`.
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
    """Stores the tokens that leave the windows, and shifts the remaining ones. Grid: (rows, cdiv(slots, BLOCK)).

    Args:
        shift: offset to subtract from all keys that were in the window, float32 [rows, key_dim], or None.
        feedback: matrices by which keys are rounded, as in `store_new_kernel`.
    """
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
    """Returns the token in each slot of a window, int64, and whether there is one; see `pages/rows.py`."""
    ring = slots - sink_slots
    back = (length - 1 - (slot - sink_slots)) % ring
    back = tl.where(back < 0, back + ring, back)
    token = tl.where(slot < sink_slots, slot, length - 1 - back)
    there = tl.where(slot < sink_slots, slot < tl.minimum(length, sink_end), token >= start)
    return token, there & (slot < slots)
