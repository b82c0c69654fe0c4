"""Where each token stands among its like, and which pages rows take and give back (Triton); see `kernels.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compact.kernels import column
from ..scan import sum_totals
from ..store_uniform.kernels import CAPACITY, FREE, START, new_start
from .kernels import ADDED, COUNTS, GIVES, HIGH_LEVEL, KEPT, LACKS, LAYER, LOW_LEVEL, PADDING_LEVEL, kinds


@triton.jit
def tier_pages(plan, count, row, rows, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Pages that a row's tier has and will have."""
    after = tl.load(plan + (KEPT + IS_LOW) * rows + row) + tl.load(plan + (ADDED + IS_LOW) * rows + row)
    held = tl.load(count + row)
    return (held + TIER.capacity - 1) // TIER.capacity, (after + TIER.capacity - 1) // TIER.capacity


@triton.jit
def list_pages(ring, ring_state, table, entries, have, need, place, width, IS_LOW: tl.constexpr, CHUNK: tl.constexpr):
    """Page ids of one tier of a row, taken from the free list from `place` on where it lacks them."""
    lane = tl.arange(0, CHUNK)
    capacity = tl.maximum(tl.load(ring_state + CAPACITY), 1)
    first = 0
    while first < tl.maximum(have, need):
        entry = first + lane
        page = tl.load(table + column(entry, width, IS_LOW), mask=entry < have, other=0)
        fresh = (entry >= have) & (entry < need)
        page += tl.load(ring + (place + entry - have) % capacity, mask=fresh, other=0)
        tl.store(entries + IS_LOW * width + entry, page, mask=(entry < have) | fresh)
        first += CHUNK


@triton.jit
def list_block(level, before, plan, order, target, high_count, low_count, row, block, blocks, rows, columns, past,
               BLOCK: tl.constexpr):  # fmt: skip
    """Ranks of a block's tokens, and its slots that become free."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    there = token < columns
    place = row.to(tl.int64) * columns + token
    earned = tl.load(level + place, mask=there, other=PADDING_LEVEL)
    is_high, is_low, high, low = kinds(high_count, low_count, row, token)
    counts = before + (row.to(tl.int64) * blocks + block) * 4
    keeps_high, keeps_low = is_high & (earned == HIGH_LEVEL), is_low & (earned == LOW_LEVEL)
    adds_high = (token >= high + low) & (earned == HIGH_LEVEL)
    adds_low = ~is_low & (earned == LOW_LEVEL)
    kept_high = tl.load(counts) + tl.cumsum(keeps_high.to(tl.int32), 0) - keeps_high.to(tl.int32)
    kept_low = tl.load(counts + 1) + tl.cumsum(keeps_low.to(tl.int32), 0) - keeps_low.to(tl.int32)
    added_high = tl.load(counts + 2) + tl.cumsum(adds_high.to(tl.int32), 0) - adds_high.to(tl.int32)
    added_low = tl.load(counts + 3) + tl.cumsum(adds_low.to(tl.int32), 0) - adds_low.to(tl.int32)
    found = tl.where(adds_high, added_high, added_low)
    found = tl.where(keeps_high, tl.load(plan + KEPT * rows + row) - 1 - kept_high, found)
    found = tl.where(keeps_low, tl.load(plan + (KEPT + 1) * rows + row) - 1 - kept_low, found)
    tl.store(order + place, found, mask=there)
    free = target + row.to(tl.int64) * past
    tl.store(free + token - kept_high, token, mask=is_high & ~keeps_high)
    tl.store(free + token - kept_low, token - high, mask=is_low & ~keeps_low)


@triton.jit(do_not_specialize=["table", *COUNTS, "rows", "width", "columns", "past", "blocks"])
def list_kernel(
    ring, ring_state, table, entries, level, before, plan, order, target, high_count, low_count, rows, width, columns,
    past, blocks, HIGH: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks + 1), the last for the pages; columns: P and the new tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    if block < blocks:
        list_block(level, before, plan, order, target, high_count, low_count, row, block, blocks, rows, columns, past,
                   BLOCK)  # fmt: skip
    else:
        taken, _ = sum_totals(plan + LACKS * rows, row, rows, CHUNK)
        place = tl.load(ring_state + START) + taken
        held = table + row.to(tl.int64) * width
        own = entries + row.to(tl.int64) * (2 * width)
        have, need = tier_pages(plan, high_count, row, rows, HIGH, 0)
        list_pages(ring, ring_state, held, own, have, need, place, width, 0, CHUNK)
        place += tl.maximum(need - have, 0)
        have, need = tier_pages(plan, low_count, row, rows, LOW, 1)
        list_pages(ring, ring_state, held, own, have, need, place, width, 1, CHUNK)


@triton.jit
def give_pages(ring, capacity, own, have, need, place, CHUNK: tl.constexpr):
    """Gives a tier's pages from the `need`-th on back, to the free list from `place` on."""
    lane = tl.arange(0, CHUNK)
    first = need
    while first < have:
        entry = first + lane
        page = tl.load(own + entry, mask=entry < have, other=0)
        tl.store(ring + (place + entry - need) % capacity, page, mask=entry < have)
        first += CHUNK


@triton.jit(do_not_specialize=[*LAYER, "count", "rows", "heads", "width", "tokens", "window"])
def finish_kernel(
    ring, state, ring_state, table, entries, plan, high_count, low_count, count, length, window_start, rows, heads,
    width, tokens, window, HIGH: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). A row's program alone reads its counts, and of a request that of its first head its lengths."""
    row = tl.program_id(0)
    given, gives = sum_totals(plan + GIVES * rows, row, rows, CHUNK)
    start, free = tl.load(ring_state + START), tl.load(ring_state + FREE)
    capacity = tl.maximum(tl.load(ring_state + CAPACITY), 1)
    own = entries + row.to(tl.int64) * (2 * width)
    high_have, high_need = tier_pages(plan, high_count, row, rows, HIGH, 0)
    low_have, low_need = tier_pages(plan, low_count, row, rows, LOW, 1)
    place = start + free + given
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
    for tier in tl.static_range(2):
        after = tl.load(plan + (KEPT + tier) * rows + row) + tl.load(plan + (ADDED + tier) * rows + row)
        tl.debug_barrier()
        tl.store((high_count if tier == 0 else low_count) + row, after)
    if row % heads == 0:
        request = row // heads
        begin, total = new_start(count, length, window_start, request, True, tokens, window)
        tl.debug_barrier()
        tl.store(length + request, total)
        tl.store(window_start + request, begin)
    if row == 0:
        _, lacks = sum_totals(plan + LACKS * rows, row, rows, CHUNK)
        tl.store(state + START, (start + lacks) % capacity)
        tl.store(state + FREE, free - lacks + gives)
