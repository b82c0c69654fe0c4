"""Triton kernels for one compaction by Algorithm 1 (DiffKV, sections 4.3 and 5), in four launches for any load.

    find_victims   finds the least significant token of the tier that each row's candidate enters, in splits of the row;
                   skipped if pages have no scores, since each row then uses one tier
    plan_rows      decides what each row writes and which pages it needs; ranks rows within a block, totals each block
    assign_pages   ranks all rows; takes page ids from the free list; updates the table and counts
    move_tokens    requantises a demoted victim, then quantises the candidate into its slot (see `move_kernel`)

`plan` is int32 [4, rows]: the index of the token written in the high and the low tier (-1: none), then the rank within
the block of the page needed by each tier (-1: none).

Ranks among all rows are prefix sums computed in two launches (DiffKV, section 5: coordination). The first ranks the
rows within each block and stores the block's total. The second adds the totals of the preceding blocks. No program
waits for another, so the result does not depend on the order in which they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import load_positions, load_scores

FREE_LIST_EXHAUSTED = tl.constexpr(1)
ROW_FULL = tl.constexpr(2)


@triton.jit
def pair_ranks(first, second):
    """Ranks two sets of rows of one block with a single scan.

    Args:
        first, second: membership of each row, bool [BLOCK], with BLOCK at most 32768.

    Returns:
        The ranks of both sets (the number of members before each row), int32 [BLOCK], then both totals, int32.
    """
    packed = first.to(tl.int32) | (second.to(tl.int32) << 16)
    inclusive = tl.cumsum(packed, 0)
    total = tl.sum(packed, 0)
    before = inclusive - packed
    return before & 0xFFFF, before >> 16, total & 0xFFFF, total >> 16


@triton.jit
def sum_totals(totals, block, blocks, CHUNK: tl.constexpr):
    """Returns the sum of `totals`, int32 [blocks], over the blocks before `block`, and over all blocks."""
    lane = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    every = tl.zeros((CHUNK,), tl.int32)
    first = 0
    while first < blocks:
        index = first + lane
        total = tl.load(totals + index, mask=index < blocks, other=0)
        before += tl.where(index < block, total, 0)
        every += total
        first += CHUNK
    return tl.sum(before, 0), tl.sum(every, 0)


@triton.jit
def mean_significance(score, position, length):
    """Returns score / max(length - 1 - position, 1) in float32, rounded as in PyTorch."""
    later = tl.maximum(length.to(tl.int32) - 1 - position.to(tl.int32), 1)
    return tl.div_rn(score, later.to(tl.float32))


@triton.jit
def candidate_level(score, position, leaving, length, high_threshold, low_threshold):
    """Returns whether each candidate enters the high tier, and whether it enters the low tier."""
    mean = mean_significance(score, position, length)
    leaves = leaving != 0
    to_high = leaves & (mean >= high_threshold)
    to_low = leaves & (mean < high_threshold) & (mean >= low_threshold)
    return to_high, to_low


@triton.jit
def column(entry, width, IS_LOW: tl.constexpr):
    """Returns the table column of a row's `entry`-th page: high pages from the left, low pages from the right."""
    if IS_LOW:
        entry = width - 1 - entry
    return entry


@triton.constexpr_function
def page_slots(capacity):
    """Returns the number of slots that a page occupies in a tile of the search."""
    return triton.next_power_of_2(capacity)


@triton.constexpr_function
def tile_pages(capacity, tokens):
    """Returns the number of pages in a search tile of about `tokens` tokens."""
    return max(1, tokens // page_slots(capacity))


@triton.jit
def least_significant(
    pages, table, width, count, length, first, limit, TIER: tl.constexpr, IS_LOW: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Returns mean, position and index of the least significant token on pages [first, limit) of a row.

    Ties go to the oldest token. The search reads about TOKENS tokens at a time.
    """
    TILE_SLOTS: tl.constexpr = page_slots(TIER.capacity)
    TILE_PAGES: tl.constexpr = tile_pages(TIER.capacity, TOKENS)
    FARTHEST: tl.constexpr = 2147483647
    slot = tl.arange(0, TILE_SLOTS)[None, :]
    best = tl.full((TILE_PAGES, TILE_SLOTS), float("inf"), tl.float32)
    best_position = tl.full((TILE_PAGES, TILE_SLOTS), FARTHEST, tl.int32)
    best_index = tl.zeros((TILE_PAGES, TILE_SLOTS), tl.int32)
    last = tl.minimum((count + TIER.capacity - 1) // TIER.capacity, limit)
    start = first
    while start < last:
        entry = start + tl.arange(0, TILE_PAGES)
        page = tl.load(table + column(entry, width, IS_LOW), mask=entry < last, other=0).to(tl.int64)
        base = (pages + page * TIER.page_bytes)[:, None]
        index = entry[:, None] * TIER.capacity + slot
        # whole pages are loaded to keep the loads wide; unused slots are dropped afterwards
        held = (entry < last)[:, None] & (slot < TIER.capacity)
        score = load_scores(base + TIER.score_offset, slot, held, TIER.score_bytes)
        position = load_positions(base + TIER.position_offset, slot, held, TIER.position_bytes)
        exists = held & (index < count)
        mean = tl.where(exists, mean_significance(score, position, length), float("inf"))
        position = tl.where(exists, position, FARTHEST)
        less = (mean < best) | ((mean == best) & (position < best_position))
        best = tl.where(less, mean, best)
        best_position = tl.where(less, position, best_position)
        best_index = tl.where(less, index, best_index)
        start += TILE_PAGES
    least = tl.min(tl.min(best, 1), 0)
    position = tl.where(best == least, best_position, FARTHEST)
    oldest = tl.min(tl.min(position, 1), 0)
    chosen = (best == least) & (best_position == oldest)
    return least, oldest, tl.max(tl.max(tl.where(chosen, best_index, 0), 1), 0)


@triton.jit(do_not_specialize=["victim_position", "victim_index", "rows", "width", "splits", "split_pages"])
def find_victims_kernel(
    pages, table, high_count, low_count, score, position, leaving, length, high_threshold, low_threshold,
    victim_mean, victim_position, victim_index, rows, width, splits, split_pages,
    HIGH: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Finds the least significant token in one split of the tier that the row's candidate enters.

    The last split takes all remaining pages. Grid: (rows, splits).

    Args:
        victim_mean: float32 [splits, rows], +inf if there is no token.
        victim_position, victim_index: int32 [splits, rows].
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    seen = tl.load(length + row)
    to_high, to_low = candidate_level(
        tl.load(score + row), tl.load(position + row), tl.load(leaving + row), seen, tl.load(high_threshold + row),
        tl.load(low_threshold + row),
    )  # fmt: skip
    entries = table + row.to(tl.int64) * width
    first = split * split_pages
    limit = tl.where(split == splits - 1, 2147483647, first + split_pages)
    mean = float("inf")
    oldest = 2147483647
    index = 0
    if to_high:
        count = tl.load(high_count + row)
        mean, oldest, index = least_significant(pages, entries, width, count, seen, first, limit, HIGH, False, TOKENS)
    if to_low:
        count = tl.load(low_count + row)
        mean, oldest, index = least_significant(pages, entries, width, count, seen, first, limit, LOW, True, TOKENS)
    out = split * rows + row
    tl.store(victim_mean + out, mean)
    tl.store(victim_position + out, oldest)
    tl.store(victim_index + out, index)


@triton.jit(do_not_specialize=["victim_position", "victim_index", "rows", "width", "splits"])
def plan_rows_kernel(
    high_count, low_count, score, position, leaving, length, high_threshold, low_threshold, victim_mean,
    victim_position, victim_index, plan, totals, rows, width, splits,
    HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, BLOCK: tl.constexpr, ONE_TIER: tl.constexpr,
):  # fmt: skip
    """Decides for BLOCK rows which tokens are written where, and which pages are needed. Grid: (blocks,).

    If pages have no scores, victims and `low_threshold` are None. All candidates are then high with ONE_TIER,
    otherwise only those with a `high_threshold` of 0.

    Args:
        plan: int32 [4, rows], see the module docstring.
        totals: pages needed by the high and the low tier, and rows whose two ends would meet, int32 [3, blocks].
    """
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    high_tokens = tl.load(high_count + row, mask=inside, other=0)
    low_tokens = tl.load(low_count + row, mask=inside, other=0)
    leaves = tl.load(leaving + row, mask=inside, other=0)
    if victim_mean is None:
        to_high = leaves != 0
        to_low = tl.zeros((BLOCK,), tl.int1)
        if not ONE_TIER:
            to_low = to_high & (tl.load(high_threshold + row, mask=inside, other=0.0) > 0)
            to_high = to_high & (to_low == 0)
        high_index = high_tokens
        low_index = low_tokens
    else:
        high_limit = tl.load(high_threshold + row, mask=inside, other=0.0)
        low_limit = tl.load(low_threshold + row, mask=inside, other=0.0)
        to_high, to_low = candidate_level(
            tl.load(score + row, mask=inside, other=0.0), tl.load(position + row, mask=inside, other=0), leaves,
            tl.load(length + row, mask=inside, other=0), high_limit, low_limit,
        )  # fmt: skip
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        oldest = tl.full((BLOCK,), 2147483647, tl.int32)
        victim = tl.zeros((BLOCK,), tl.int32)
        split = 0
        while split < splits:
            at = split * rows + row
            mean = tl.load(victim_mean + at, mask=inside, other=float("inf"))
            age = tl.load(victim_position + at, mask=inside, other=2147483647)
            index = tl.load(victim_index + at, mask=inside, other=0)
            less = (mean < least) | ((mean == least) & (age < oldest))
            least = tl.where(less, mean, least)
            oldest = tl.where(less, age, oldest)
            victim = tl.where(less, index, victim)
            split += 1
        displaced_high = to_high & (least < high_limit)
        demoted = displaced_high & (least >= low_limit)
        displaced_low = to_low & (least < low_limit)
        high_index = tl.where(displaced_high, victim, high_tokens)
        low_index = tl.where(displaced_low, victim, low_tokens)
        to_low = to_low | demoted

    need_high = to_high & (high_index == high_tokens) & (high_tokens % HIGH_CAPACITY == 0)
    need_low = to_low & (low_index == low_tokens) & (low_tokens % LOW_CAPACITY == 0)
    held = (high_tokens + HIGH_CAPACITY - 1) // HIGH_CAPACITY + (low_tokens + LOW_CAPACITY - 1) // LOW_CAPACITY
    full = held + need_high.to(tl.int32) + need_low.to(tl.int32) > width
    full = full & (need_high | need_low)

    high_rank, low_rank, high_total, low_total = pair_ranks(need_high, need_low)
    blocks = tl.num_programs(0)
    tl.store(totals + block, high_total)
    tl.store(totals + blocks + block, low_total)
    tl.store(totals + 2 * blocks + block, tl.sum(full.to(tl.int32), 0))
    tl.store(plan + row, tl.where(to_high, high_index, -1), mask=inside)
    tl.store(plan + rows + row, tl.where(to_low, low_index, -1), mask=inside)
    tl.store(plan + 2 * rows + row, tl.where(need_high, high_rank, -1), mask=inside)
    tl.store(plan + 3 * rows + row, tl.where(need_low, low_rank, -1), mask=inside)


@triton.jit(do_not_specialize=["rows", "width"])
def assign_pages_kernel(
    ring, state, table, high_count, low_count, plan, totals, taken, flag, rows, width,
    HIGH_CAPACITY: tl.constexpr, LOW_CAPACITY: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Takes the pages of BLOCK rows from the free list: all high pages in row order, then all low pages.

    If pages run out or a row is full, the whole compaction is cancelled: nothing moves, and `flag` gives the reason.
    Grid: (blocks,).

    Args:
        taken: number of pages taken, int32 [1].
        flag: error bits, int32 [1].
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    high_before, high_total = sum_totals(totals, block, blocks, CHUNK)
    low_before, low_total = sum_totals(totals + blocks, block, blocks, CHUNK)
    _, full = sum_totals(totals + 2 * blocks, block, blocks, CHUNK)
    start = tl.load(state)
    free = tl.load(state + 1)
    capacity = tl.maximum(tl.load(state + 2), 1)
    total = high_total + low_total
    reason = tl.where(total > free, FREE_LIST_EXHAUSTED, 0) | tl.where(full > 0, ROW_FULL, 0)
    if block == 0:
        tl.store(taken, tl.where(reason == 0, total, 0))
        tl.store(flag, tl.load(flag) | reason)

    row = block * BLOCK + tl.arange(0, BLOCK)
    inside = row < tl.where(reason == 0, rows, 0)
    high_tokens = tl.load(high_count + row, mask=inside, other=0)
    low_tokens = tl.load(low_count + row, mask=inside, other=0)
    high_index = tl.load(plan + row, mask=inside, other=-1)
    low_index = tl.load(plan + rows + row, mask=inside, other=-1)
    high_rank = tl.load(plan + 2 * rows + row, mask=inside, other=-1)
    low_rank = tl.load(plan + 3 * rows + row, mask=inside, other=-1)

    entries = table + row.to(tl.int64) * width
    page = tl.load(ring + (start + high_before + high_rank) % capacity, mask=high_rank >= 0, other=0)
    tl.store(entries + column(high_tokens // HIGH_CAPACITY, width, False), page, mask=high_rank >= 0)
    page = tl.load(ring + (start + high_total + low_before + low_rank) % capacity, mask=low_rank >= 0, other=0)
    tl.store(entries + column(low_tokens // LOW_CAPACITY, width, True), page, mask=low_rank >= 0)
    tl.store(high_count + row, high_tokens + (high_index == high_tokens).to(tl.int32), mask=inside)
    tl.store(low_count + row, low_tokens + (low_index == low_tokens).to(tl.int32), mask=inside)
    tl.store(plan + row, high_index, mask=row < rows)
    tl.store(plan + rows + row, low_index, mask=row < rows)
