"""Triton functions for rows, shared by all kernels of this op, and the kernel that ends a prompt.

Rows are (request, head). Unless stated otherwise, `length`, `window_start` and `sink_end` are int64 [batch], with the
values before the new tokens, and `count` is the number of new real tokens, int64 [batch], or None if all `tokens` are
real. `rank` is the number of real tokens before each, int32 [batch, tokens], -1 for padding; None if all are real.

    plan        tokens that the high and the low tier keep, tokens that they gain, pages that the row lacks, and pages
                that it frees, int32 [6, rows]
    ring_state  the free list's earlier state, int64 [3]
    entries     page ids of both tiers, int32 [rows, 2, width]; None if the page table has them already
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...pages import pool
from ..compact.kernels import sum_totals

# arguments of one layer, whose addresses may have any alignment
LENGTHS = ("length", "window_start", "sink_end")
COUNTS = ("high_count", "low_count")
START, FREE, CAPACITY = tl.constexpr(pool.START), tl.constexpr(pool.FREE), tl.constexpr(pool.CAPACITY)
# rows of `plan`; KEPT and ADDED have one for each tier
KEPT, ADDED, LACKS, GIVES = tl.constexpr(0), tl.constexpr(2), tl.constexpr(4), tl.constexpr(5)


@triton.jit
def row_and_place(BLOCK: tl.constexpr):
    """Returns the row and the tokens, or slots, of a program in a grid (blocks, heads, batch).

    Blocks come first, because CUDA allows 65,535 programs along the other axes.
    """
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return row, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def new_start(count, length, window_start, request, there, tokens, window):
    """Returns the windows' start and the requests' length including the new tokens, int64."""
    more = tokens
    if count is not None:
        more = tl.load(count + request, mask=there, other=0)
    total = tl.load(length + request, mask=there, other=0) + more
    return tl.maximum(tl.load(window_start + request, mask=there, other=0), total - window), total


@triton.jit
def new_tokens(token, rank, count, length, window_start, sink_end, request, tokens, window):
    """Returns which new tokens are real, their positions, the sinks' end, and the results of `new_start`."""
    order = token
    real = (token >= 0) & (token < tokens)
    if rank is not None:
        order = tl.load(rank + request * tokens + token, mask=real, other=-1)
        real = real & (order >= 0)
    start, total = new_start(count, length, window_start, request, True, tokens, window)
    return real, tl.load(length + request) + order, tl.load(sink_end + request), start, total


@triton.jit
def token_in_slot(slot, start, length, sink_end, sink_slots, slots):
    """Returns the token in each slot of a window, int64, and whether there is one; see `pages/rows.py`."""
    ring = slots - sink_slots
    back = (length - 1 - (slot - sink_slots)) % ring
    back = tl.where(back < 0, back + ring, back)
    token = tl.where(slot < sink_slots, slot, length - 1 - back)
    there = tl.where(slot < sink_slots, slot < tl.minimum(length, sink_end), token >= start)
    return token, there & (slot < slots)


@triton.jit
def slot_of(position, sinks, row, slots, sink_slots):
    """Returns the slots of tokens among the slots of all windows, int64."""
    slot = tl.where(position < sinks, position, sink_slots + position % (slots - sink_slots))
    return slot + row.to(tl.int64) * slots


@triton.jit
def copy_state(state, ring_state, row):
    """Copies the free list's state in the first row's program, because all rows read it and the last kernel sets it."""
    if row == 0:
        for part in tl.static_range(3):
            tl.store(ring_state + part, tl.load(state + part))


@triton.jit
def count_after(plan, row, rows, IS_LOW: tl.constexpr):
    """Returns the number of tokens that a tier of a row will have."""
    return tl.load(plan + (KEPT + IS_LOW) * rows + row) + tl.load(plan + (ADDED + IS_LOW) * rows + row)


@triton.jit
def tier_pages(plan, count, row, rows, PAGE_TOKENS: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns the numbers of pages that a tier of a row has and will have."""
    return tl.cdiv(tl.load(count + row), PAGE_TOKENS), tl.cdiv(count_after(plan, row, rows, IS_LOW), PAGE_TOKENS)


@triton.jit
def give_pages(ring, capacity, own, have, need, place, CHUNK: tl.constexpr):
    """Returns a tier's pages, starting with the `need`-th, to the free list at `place`."""
    lane = tl.arange(0, CHUNK)
    first = need
    while first < have:
        entry = first + lane
        page = tl.load(own + entry, mask=entry < have, other=0)
        tl.store(ring + (place + entry - need) % capacity, page, mask=entry < have)
        first += CHUNK


@triton.jit
def write_table(ring, ring_state, table, own, plan, high_count, low_count, row, rows, width,
                HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Writes a row of the page table and frees the pages that it lost; returns the number that all rows free.

    Args:
        own: the row's part of `entries`.
    """
    before, gives = sum_totals(plan + GIVES * rows, row, rows, CHUNK)
    place = tl.load(ring_state + START) + tl.load(ring_state + FREE) + before
    capacity = tl.maximum(tl.load(ring_state + CAPACITY), 1)
    high_have, high_need = tier_pages(plan, high_count, row, rows, HIGH_CAPACITY, 0)
    low_have, low_need = tier_pages(plan, low_count, row, rows, LOW_CAPACITY, 1)
    give_pages(ring, capacity, own, high_have, high_need, place, CHUNK)
    place += tl.maximum(high_have - high_need, 0)
    give_pages(ring, capacity, own + width, low_have, low_need, place, CHUNK)
    lane = tl.arange(0, CHUNK)
    first = 0
    while first < width:
        entry = first + lane
        back = width - 1 - entry
        page = tl.load(own + entry, mask=entry < high_need, other=0)
        page += tl.load(own + width + back, mask=(back >= 0) & (back < low_need), other=0)
        tl.store(table + row.to(tl.int64) * width + entry, page, mask=entry < width)
        first += CHUNK
    return gives


@triton.jit(do_not_specialize=["table", *COUNTS, *LENGTHS, "count", "rows", "heads", "width", "tokens", "window"])
def advance_kernel(
    ring, state, ring_state, table, entries, plan, high_count, low_count, count, length, window_start, rows, heads,
    width, tokens, window, HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Updates counts, lengths, windows and the free list and, with `entries`, the page table. Grid: (rows,).

    Only a row's own program reads its counts, and only the program of a request's first head reads its lengths.
    """
    row = tl.program_id(0)
    gives = 0
    if entries is not None:
        own = entries + row.to(tl.int64) * (2 * width)
        gives = write_table(ring, ring_state, table, own, plan, high_count, low_count, row, rows, width,
                            HIGH_CAPACITY, LOW_CAPACITY, CHUNK)  # fmt: skip
    tl.debug_barrier()
    tl.store(high_count + row, count_after(plan, row, rows, 0))
    if low_count is not None:
        tl.store(low_count + row, count_after(plan, row, rows, 1))
    if row % heads == 0:
        request = row // heads
        start, total = new_start(count, length, window_start, request, True, tokens, window)
        tl.debug_barrier()
        tl.store(length + request, total)
        tl.store(window_start + request, start)
    if row == 0:
        _, lacks = sum_totals(plan + LACKS * rows, row, rows, CHUNK)
        capacity = tl.maximum(tl.load(ring_state + CAPACITY), 1)
        tl.store(state + START, (tl.load(ring_state + START) + lacks) % capacity)
        tl.store(state + FREE, tl.load(ring_state + FREE) - lacks + gives)
