"""Many new tokens enter rows that keep every token high, in order (Triton): pages without scores and positions.

    sum_keys       sums of the new keys, where some row may be centred
    fix_offsets    the rows' offsets, and what their windows are to be shifted by
    take_pages     page ids from the free list for what will leave the windows
    leave_window   tokens that were in a window are centred anew, and quantised where they leave it
    store_new      new tokens are rotated, centred, checked and quantised into their pages, or stay in the window
    advance        counts, lengths, windows and the free list follow

Token p of a request is in the window where p < sink_end or p >= start, and otherwise the (p - sink_end)-th of its row.
Rows are (request, head). Where nothing else is said, `length`, `window_start` and `sink_end` are int64 [batch] as they
were before these tokens, and `count` int64 [batch] says how many real ones there are, None for `tokens` of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

# what is of one layer, and so stands at any address
LENGTHS = ("length", "window_start", "sink_end")
START, FREE, CAPACITY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def new_start(count, length, window_start, request, there, tokens, window):
    """Where windows start once the new tokens are there, and how many tokens there are then; int64."""
    more = tokens
    if count is not None:
        more = tl.load(count + request, mask=there, other=0)
    total = tl.load(length + request, mask=there, other=0) + more
    return tl.maximum(tl.load(window_start + request, mask=there, other=0), total - window), total


@triton.jit
def row_counts(high_count, count, length, window_start, sink_end, row, there, heads, tokens, window,
               PAGE_TOKENS: tl.constexpr):  # fmt: skip
    """Tokens of rows once the new ones are there, the pages that they have, and those that they lack."""
    request = row // heads
    start, _ = new_start(count, length, window_start, request, there, tokens, window)
    after = (start - tl.load(sink_end + request, mask=there, other=0)).to(tl.int32)
    held = tl.load(high_count + row, mask=there, other=0)
    have = (held + PAGE_TOKENS - 1) // PAGE_TOKENS
    need = (after + PAGE_TOKENS - 1) // PAGE_TOKENS
    return after, have, tl.where(there, tl.maximum(need - have, 0), 0)


@triton.jit(do_not_specialize=["table", "high_count", *LENGTHS, "rows", "heads", "width", "tokens", "window"])
def take_pages_kernel(
    ring, state, table, high_count, count, length, window_start, sink_end, rows, heads, width, tokens, window,
    PAGE_TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). The free list itself follows in `advance_kernel`, as all rows read where it starts."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < row:
        other = first + lane
        _, _, lacks = row_counts(high_count, count, length, window_start, sink_end, other, other < row, heads, tokens,
                                 window, PAGE_TOKENS)  # fmt: skip
        before += lacks
        first += CHUNK
    one = row + tl.zeros((1,), tl.int32)
    _, have, lacks = row_counts(high_count, count, length, window_start, sink_end, one, one < rows, heads, tokens,
                                window, PAGE_TOKENS)  # fmt: skip
    have, lacks = tl.sum(have, 0), tl.sum(lacks, 0)
    place = tl.load(state + START) + tl.sum(before, 0)
    capacity = tl.maximum(tl.load(state + CAPACITY), 1)
    base = table + row.to(tl.int64) * width + have
    taken = 0
    while taken < lacks:
        index = taken + lane
        page = tl.load(ring + (place + index) % capacity, mask=index < lacks, other=0)
        tl.store(base + index, page, mask=index < lacks)
        taken += CHUNK


@triton.jit(do_not_specialize=["high_count", *LENGTHS, "rows", "batch", "heads", "tokens", "window"])
def advance_kernel(
    state, high_count, count, length, window_start, sink_end, rows, batch, heads, tokens, window,
    PAGE_TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: every row reads what is written of its request in the end."""
    lane = tl.arange(0, CHUNK)
    taken = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < rows:
        row = first + lane
        after, _, lacks = row_counts(high_count, count, length, window_start, sink_end, row, row < rows, heads, tokens,
                                     window, PAGE_TOKENS)  # fmt: skip
        taken += lacks
        tl.store(high_count + row, after, mask=row < rows)
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
