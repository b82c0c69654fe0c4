"""Triton kernels that store many new tokens in order, in pages without scores and positions.

    take_pages     plans each row, and takes page ids from the free list for the tokens that leave the windows
    leave_window   centres the tokens of the windows, and quantises those that leave
    store_new      rotates, centres and checks new tokens, and quantises them into pages or keeps them in the window

If necessary, sums of keys are computed and offsets fixed beforehand (`offset_kernels.py`); `advance` follows
(`row_kernels.py`, which describes common arguments).

Token p of a request is in the window if p < sink_end or p >= start; otherwise it is the (p - sink_end)-th token of its
row. A row is low if `alpha_high`, float32 [rows], is above 0. With one tier, `alpha_high` and `low_count` are None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compact.kernels import column
from .row_kernels import (
    ADDED,
    CAPACITY,
    COUNTS,
    LACKS,
    LENGTHS,
    START,
    copy_state,
    new_start,
    new_tokens,
    row_and_place,
    slot_of,
    token_in_slot,
)
from .tile_kernels import Incoming, Target, WindowSlots, enter_tile, leave_tile


@triton.jit
def is_low(alpha_high, row):
    """Returns whether a row is low; None with one tier, which compiles as False."""
    low = None
    if alpha_high is not None:
        low = tl.load(alpha_high + row) > 0
    return low


@triton.jit
def row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, row, there, heads, tokens,
               window, HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr):  # fmt: skip
    """Returns which rows are low, their stored tokens before and after, and the pages they have and lack."""
    request = row // heads
    start, _ = new_start(count, length, window_start, request, there, tokens, window)
    after = (start - tl.load(sink_end + request, mask=there, other=0)).to(tl.int32)
    held = tl.load(high_count + row, mask=there, other=0)
    low = tl.zeros_like(there)
    if alpha_high is not None:
        low = tl.load(alpha_high + row, mask=there, other=0.0) > 0
        held = tl.where(low, tl.load(low_count + row, mask=there, other=0), held)
    capacity = tl.where(low, LOW_CAPACITY, HIGH_CAPACITY)
    have, need = tl.cdiv(held, capacity), tl.cdiv(after, capacity)
    return low, held, after, have, tl.where(there, tl.maximum(need - have, 0), 0)


@triton.jit(do_not_specialize=["table", "alpha_high", *COUNTS, *LENGTHS, "rows", "heads", "width", "tokens", "window"])
def take_pages_kernel(
    ring, state, ring_state, table, plan, alpha_high, high_count, low_count, count, length, window_start, sink_end,
    rows, heads, width, tokens, window, HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Plans a row and takes the pages that it lacks. Grid: (rows,)."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < row:
        other = first + lane
        _, _, _, _, lacks = row_counts(alpha_high, high_count, low_count, count, length, window_start, sink_end, other,
                                       other < row, heads, tokens, window, HIGH_CAPACITY, LOW_CAPACITY)  # fmt: skip
        before += lacks
        first += CHUNK
    kind = tl.arange(0, 4)
    # the same row in every lane, with a lane for each kind of token in the plan
    one = row + tl.zeros_like(kind)
    low, held, after, have, lacks = row_counts(
        alpha_high, high_count, low_count, count, length, window_start, sink_end, one, one < rows, heads, tokens,
        window, HIGH_CAPACITY, LOW_CAPACITY,
    )  # fmt: skip
    number = tl.where(kind < ADDED, held, after - held)
    tl.store(plan + kind * rows + row, tl.where((kind % 2 == 1) == low, number, 0))
    have, lacks = tl.max(have, 0), tl.max(lacks, 0)
    tl.store(plan + LACKS * rows + row, lacks)
    copy_state(state, ring_state, row)
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


@triton.jit
def target_in_order(table, row, width, index, leaves, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns the target of the tokens at `index` (int64 [tokens]) in their row."""
    entry = table + row.to(tl.int64) * width + column(index // TIER.capacity, width, IS_LOW)
    return Target(leaves, tl.load(entry, mask=leaves, other=0).to(tl.int64), index % TIER.capacity)


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
    """Stores the tokens that leave the windows, and shifts the others. Grid: (cdiv(slots, BLOCK), heads, batch).

    Args:
        shift, feedback: arguments of `leave_tile`.
    """
    row, slot = row_and_place(BLOCK)
    request = row // heads
    before, sinks = tl.load(window_start + request), tl.load(sink_end + request)
    start, _ = new_start(count, length, window_start, request, True, tokens, window)
    token, there = token_in_slot(slot, before, tl.load(length + request), sinks, sink_slots, slots)
    leaves = there & (token >= sinks) & (token < start)
    stays, slot = there & ~leaves, slot + row.to(tl.int64) * slots
    if is_low(alpha_high, row):
        to = target_in_order(table, row, width, token - sinks, leaves, LOW, 1)
        leave_tile(pages, to, window_key, window_value, None, slot, token, there, stays, shift, feedback, row, LOW,
                   DTYPE)  # fmt: skip
    else:
        to = target_in_order(table, row, width, token - sinks, leaves, HIGH, 0)
        leave_tile(pages, to, window_key, window_value, None, slot, token, there, stays, shift, feedback, row, HIGH,
                   DTYPE)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *("table", "alpha_high", "window_score", *LENGTHS),
        *("rank", "count", "heads", "width", "tokens", "window", "slots", "sink_slots"),
        *("key_batch", "key_head", "key_token", "value_batch", "value_head", "value_token"),
    ]
)
def store_new_kernel(
    pages, table, alpha_high, window_key, window_value, window_score, length, window_start, sink_end, invalid, key,
    value, rank, count, key_matrix, value_matrix, offset, feedback, codes, limit, heads, width, tokens, window, slots,
    sink_slots, key_batch, key_head, key_token, value_batch, value_head, value_token,
    HIGH: tl.constexpr, LOW: tl.constexpr, KEY_ROOT: tl.constexpr, VALUE_ROOT: tl.constexpr, INNER: tl.constexpr,
    DTYPE: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores new tokens in pages or in the window. Grid: (cdiv(tokens, BLOCK), heads, batch).

    Args:
        key, value: key and value states of the model, [batch, heads, tokens, dim], with the given strides.
        key_matrix, value_matrix, offset, feedback, limit: fields of `Incoming`.
        codes: result of `choose_codes_kernel`, or None.
        invalid: field of `WindowSlots`.
    """
    row, token = row_and_place(BLOCK)
    request, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    real, position, sinks, start, _ = new_tokens(
        token, rank, count, length, window_start, sink_end, request, tokens, window
    )
    stays = real & ((position < sinks) | (position >= start))
    keys = key + request * key_batch + head * key_head + token.to(tl.int64) * key_token
    values = value + request * value_batch + head * value_head + token.to(tl.int64) * value_token
    chosen = codes
    if codes is not None:
        chosen = codes + (row.to(tl.int64) * tokens + token) * HIGH.key_dim
    new = Incoming(keys, values, key_matrix, value_matrix, offset, feedback, chosen, limit)
    slot = slot_of(position, sinks, row, slots, sink_slots)
    exact = WindowSlots(window_key, window_value, window_score, slot, stays, invalid)
    score = tl.zeros((BLOCK,), tl.float32)
    if is_low(alpha_high, row):
        to = target_in_order(table, row, width, position - sinks, real & ~stays, LOW, 1)
        enter_tile(pages, to, new, exact, real, score, position, row, LOW, KEY_ROOT, VALUE_ROOT, INNER, DTYPE, OPERAND)
    else:
        to = target_in_order(table, row, width, position - sinks, real & ~stays, HIGH, 0)
        enter_tile(pages, to, new, exact, real, score, position, row, HIGH, KEY_ROOT, VALUE_ROOT, INNER, DTYPE, OPERAND)
