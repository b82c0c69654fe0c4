"""Triton kernels that decide levels by thresholds (DiffKV, section 4.2), and list where tokens go.

    decide        adds the received attention to every token's sum, decides its level, and counts the levels
    count         counts the tokens before each block, those a row keeps and gains, and the pages it lacks and frees
    list          lists each token's rank among its kind, the slots that become free, and the rows' page ids

If necessary, sums of keys are computed and offsets fixed beforehand (`offset_kernels.py`). Tokens are then moved
(`move_kernels.py`), and `advance` ends the prompt (`row_kernels.py`, which describes common arguments).

Each token has a column. The first P columns are the old tokens: a row's high tokens, then its low tokens, then those of
its window by position. The new tokens follow in order. A kept token stays in its slot if the slot is below the tier's
new count. The free slots below that count are assigned in order, first to the tokens added to the tier, in order of
their columns, then to the kept tokens beyond the new end, from the last one back. A launch thus never writes a slot
that it, or a later launch, still has to read.

    level    level of each token (pages/rows.py), int8 [rows, columns]
    before   tokens kept in the high and the low tier and tokens added to them, int32 [rows, blocks, 4]: at first in
             each block, later in all blocks before it
    order    rank among the tier's added tokens; for kept tokens, rank from the last one, int32 [rows, columns]
    target   free slots among the old ones, int32 [rows, P]: those of the high tier and, starting at the first low
             column, those of the low tier
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import pages
from ..compact.kernels import column, mean_significance, sum_totals
from ..narrow_kernel import load_positions, load_scores, narrow_score, score_noise
from .row_kernels import (
    CAPACITY,
    COUNTS,
    GIVES,
    KEPT,
    LACKS,
    LENGTHS,
    START,
    copy_state,
    new_tokens,
    slot_of,
    tier_pages,
)

PADDING_LEVEL, PRUNED_LEVEL = tl.constexpr(pages.PADDING_LEVEL), tl.constexpr(pages.PRUNED_LEVEL)
LOW_LEVEL, HIGH_LEVEL = tl.constexpr(pages.LOW_LEVEL), tl.constexpr(pages.HIGH_LEVEL)
WINDOW_LEVEL = tl.constexpr(pages.WINDOW_LEVEL)
# arguments of one layer, whose addresses may have any alignment
LAYER = ("table", *COUNTS, *LENGTHS)


@triton.jit
def add_to_sums(pages, table, width, index, received, active, length, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Adds received attention to the sums of a row's stored tokens.

    Returns the sums as float32, before they are rounded for storage, and the positions as int32.

    Args:
        table: pointer to the row's page table.
        index: index of each token within row and tier, int32.
        length: new length of the row.
    """
    page = tl.load(table + column(index // TIER.capacity, width, IS_LOW), mask=active, other=0).to(tl.int64)
    base = pages + page * TIER.page_bytes
    slot = index % TIER.capacity
    score = load_scores(base + TIER.score_offset, slot, active, TIER.score_bytes) + received
    position = load_positions(base + TIER.position_offset, slot, active, TIER.position_bytes)
    segment = base + TIER.score_offset
    if TIER.score_bytes == 2:
        code = narrow_score(score, score_noise(index, length, IS_LOW))
        tl.store(segment.to(tl.pointer_type(tl.uint16)) + slot, code, mask=active)
    else:
        tl.store(segment.to(tl.pointer_type(tl.float32)) + slot, score, mask=active)
    return score, position


@triton.jit
def kinds(high_count, low_count, row, token):
    """Returns masks of the columns that are high and low tokens of the row, and the counts of both, int32."""
    high, low = tl.load(high_count + row), tl.load(low_count + row)
    return token < high, (token >= high) & (token < high + low), high, low


@triton.jit(
    do_not_specialize=[
        *LAYER,
        *("alpha_high", "alpha_low", "window_score"),
        *("rank", "count", "heads", "width", "tokens", "window", "slots", "sink_slots", "past"),
    ]
)
def decide_kernel(
    pages, table, high_count, low_count, alpha_high, alpha_low, window_score, length, window_start, sink_end, received,
    rank, count, level, before, heads, width, tokens, window, slots, sink_slots, past,
    HIGH: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates sums, decides levels and counts them per block. Grid: (rows, cdiv(past + tokens, BLOCK)).

    Args:
        received: float32 [rows, past + tokens].
        past: number of columns before the new tokens, P.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    request = row // heads
    token = block * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * (past + tokens) + token
    there = token < past + tokens
    real, new, sinks, start, total = new_tokens(
        token - past, rank, count, length, window_start, sink_end, request.to(tl.int64), tokens, window
    )
    held, begin = tl.load(length + request), tl.load(window_start + request)
    got = tl.load(received + place, mask=there, other=0.0)
    is_high, is_low, high, low = kinds(high_count, low_count, row, token)
    entries = table + row.to(tl.int64) * width
    score, position = add_to_sums(pages, entries, width, token, got, is_high, total, HIGH, 0)
    low_score, low_position = add_to_sums(pages, entries, width, token - high, got, is_low, total, LOW, 1)
    score, position = tl.where(is_low, low_score, score), tl.where(is_low, low_position, position).to(tl.int64)

    exact = (token - high - low).to(tl.int64)
    in_window = tl.maximum(held - begin, 0) + tl.minimum(held, sinks)
    is_exact = (exact >= 0) & (exact < in_window)
    exact = tl.where(exact < sinks, exact, exact + begin - sinks)
    slot = slot_of(exact, sinks, row, slots, sink_slots)
    sums = tl.load(window_score + slot, mask=is_exact, other=0.0) + got
    tl.store(window_score + slot, sums, mask=is_exact)

    score = tl.where(is_exact, sums, tl.where(real, got, score))
    position = tl.where(is_exact, exact, tl.where(real, new, position))
    is_new = is_exact | real
    mean = mean_significance(score, position, total)
    tokens_seen = total.to(tl.float32) + tl.zeros((BLOCK,), tl.float32)
    high_limit = tl.div_rn(tl.load(alpha_high + row) + tl.zeros((BLOCK,), tl.float32), tokens_seen)
    low_limit = tl.div_rn(tl.load(alpha_low + row) + tl.zeros((BLOCK,), tl.float32), tokens_seen)
    earned = tl.where(mean >= low_limit, LOW_LEVEL, PRUNED_LEVEL)
    earned = tl.where(mean >= high_limit, HIGH_LEVEL, earned)
    # no stored token is promoted
    earned = tl.where(is_low, tl.minimum(earned, LOW_LEVEL), earned)
    earned = tl.where(is_new & ((position < sinks) | (position >= start)), WINDOW_LEVEL, earned)
    earned = tl.where(is_high | is_low | is_new, earned, PADDING_LEVEL)
    tl.store(level + place, earned.to(tl.int8), mask=there)

    counts = before + (row.to(tl.int64) * tl.num_programs(1) + block) * 4
    tl.store(counts, tl.sum((is_high & (earned == HIGH_LEVEL)).to(tl.int32), 0))
    tl.store(counts + 1, tl.sum((is_low & (earned == LOW_LEVEL)).to(tl.int32), 0))
    tl.store(counts + 2, tl.sum((is_new & (earned == HIGH_LEVEL)).to(tl.int32), 0))
    tl.store(counts + 3, tl.sum(((is_high | is_new) & (earned == LOW_LEVEL)).to(tl.int32), 0))


@triton.jit(do_not_specialize=[*COUNTS, "rows", "blocks"])
def count_kernel(
    before, plan, high_count, low_count, state, ring_state, rows, blocks,
    HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Accumulates the blocks' counts and plans each row's pages. Grid: (rows,)."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    kind = tl.arange(0, 4)[None, :]
    total = tl.zeros((4,), tl.int32)
    first = 0
    while first < blocks:
        block = first + lane
        place = before + (row.to(tl.int64) * blocks + block)[:, None] * 4 + kind
        mask = (block < blocks)[:, None] & (kind < 4)
        some = tl.load(place, mask=mask, other=0)
        tl.store(place, tl.cumsum(some, 0) - some + total[None, :], mask=mask)
        total += tl.sum(some, 0)
        first += CHUNK
    kind = tl.arange(0, 4)
    tl.store(plan + kind * rows + row, total)
    held = tl.where(kind % 2 == 0, tl.load(high_count + row), tl.load(low_count + row))
    capacity = tl.where(kind % 2 == 0, HIGH_CAPACITY, LOW_CAPACITY)
    # kept and added counts of a tier are two entries apart
    pair = (kind[:, None] % 2 == kind[None, :] % 2).to(tl.int32)
    after = tl.sum(pair * total[None, :], 1)
    grows = tl.where(kind < 2, tl.cdiv(after, capacity) - tl.cdiv(held, capacity), 0)
    tl.store(plan + LACKS * rows + row, tl.sum(tl.maximum(grows, 0), 0))
    tl.store(plan + GIVES * rows + row, tl.sum(tl.maximum(-grows, 0), 0))
    copy_state(state, ring_state, row)


@triton.jit
def list_pages(ring, ring_state, table, entries, have, need, place, width, IS_LOW: tl.constexpr, CHUNK: tl.constexpr):
    """Lists the page ids of one tier of a row; missing pages are taken from the free list, starting at `place`."""
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
def ranks(members, before):
    """Returns the number of members before each token, int32; `before` points to the number in earlier blocks."""
    ones = members.to(tl.int32)
    return tl.load(before) + tl.cumsum(ones, 0) - ones


@triton.jit
def list_block(level, before, plan, order, target, high_count, low_count, row, block, blocks, rows, columns, past,
               BLOCK: tl.constexpr):  # fmt: skip
    """Lists the ranks of a block's tokens, and its slots that become free."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    there = token < columns
    place = row.to(tl.int64) * columns + token
    earned = tl.load(level + place, mask=there, other=PADDING_LEVEL)
    is_high, is_low, high, low = kinds(high_count, low_count, row, token)
    counts = before + (row.to(tl.int64) * blocks + block) * 4
    keeps_high, keeps_low = is_high & (earned == HIGH_LEVEL), is_low & (earned == LOW_LEVEL)
    adds_high = (token >= high + low) & (earned == HIGH_LEVEL)
    adds_low = ~is_low & (earned == LOW_LEVEL)
    kept_high, kept_low = ranks(keeps_high, counts), ranks(keeps_low, counts + 1)
    added_high, added_low = ranks(adds_high, counts + 2), ranks(adds_low, counts + 3)
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
    past, blocks, HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Lists ranks and free slots of each block and, in the last program, a row's pages. Grid: (rows, blocks + 1).

    `columns` is P plus the number of new tokens.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    if block < blocks:
        list_block(level, before, plan, order, target, high_count, low_count, row, block, blocks, rows, columns, past,
                   BLOCK)  # fmt: skip
    else:
        taken, _ = sum_totals(plan + LACKS * rows, row, rows, CHUNK)
        place = tl.load(ring_state + START) + taken
        held = table + row.to(tl.int64) * width
        own = entries + row.to(tl.int64) * (2 * width)
        have, need = tier_pages(plan, high_count, row, rows, HIGH_CAPACITY, 0)
        list_pages(ring, ring_state, held, own, have, need, place, width, 0, CHUNK)
        place += tl.maximum(need - have, 0)
        have, need = tier_pages(plan, low_count, row, rows, LOW_CAPACITY, 1)
        list_pages(ring, ring_state, held, own, have, need, place, width, 1, CHUNK)
