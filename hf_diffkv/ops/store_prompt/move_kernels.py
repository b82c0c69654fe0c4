"""Triton kernels that move stored, exact and new tokens after their levels are decided; see `level_kernels.py`.

    demote        moves demoted tokens to the low tier
    close         moves forward the kept tokens beyond the row's new end
    level_window  stores the tokens that leave the window at their level
    level_new     stores the new tokens at their level, or in the window

All but `level_new` are skipped if nothing is stored.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..narrow_kernel import load_positions, load_scores
from ..quantize.kernels import copy_tile, read_tile, rows_at, tier_dims
from .level_kernels import HIGH_LEVEL, LAYER, LOW_LEVEL, PADDING_LEVEL, kinds
from .row_kernels import ADDED, COUNTS, KEPT, count_after, new_tokens, row_and_place, slot_of, token_in_slot
from .tile_kernels import Incoming, Target, WindowSlots, enter_tile, leave_tile, store_scalars, store_tile

# what the earlier kernels have listed for all rows
Lists = namedtuple("Lists", "entries target plan level order high_count low_count rows width columns past")


@triton.jit
def place_of(lists, row, index, active, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns the place of a row's tokens `index`."""
    entry = lists.entries + (row.to(tl.int64) * 2 + IS_LOW) * lists.width + index // TIER.capacity
    return Target(active, tl.load(entry, mask=active, other=0).to(tl.int64), index % TIER.capacity)


@triton.jit
def target_of(lists, row, rank, active, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns the `rank`-th free slot of a row's tier."""
    kept = tl.load(lists.plan + (KEPT + IS_LOW) * lists.rows + row)
    high = tl.load(lists.high_count + row)
    first = high if IS_LOW else 0
    inside = (tl.load(lists.low_count + row) if IS_LOW else high) - kept
    free = lists.target + row.to(tl.int64) * lists.past + first
    listed = tl.load(free + rank, mask=active & (rank < inside), other=0)
    return place_of(lists, row, tl.where(rank < inside, listed, rank + kept), active, TIER, IS_LOW)


@triton.jit
def level_and_rank(lists, row, column, active):
    """Returns the decided levels of a row's columns, PADDING_LEVEL where not `active`, and their `order`."""
    place = row.to(tl.int64) * lists.columns + column
    earned = tl.load(lists.level + place, mask=active, other=PADDING_LEVEL)
    return earned, tl.load(lists.order + place, mask=active, other=0)


@triton.jit
def read_high(pages, at, HIGH: tl.constexpr, LOW: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr):
    """Reads keys or values of high tokens, in the order in which the low tier is packed."""
    codes, metadata = rows_at(pages + at.page * HIGH.page_bytes, at.slot, HIGH, IS_KEY)
    dim, exists = tier_dims(LOW, IS_KEY)
    return read_tile(codes, metadata, at.active, dim, exists, HIGH, IS_KEY, DTYPE)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "width", "columns", "past"])
def demote_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, feedback, rows, width, columns, past,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves high tokens to the low tier. Grid: (cdiv(past, BLOCK), heads, batch).

    Args:
        feedback: field of `Incoming`.
    """
    row, token = row_and_place(BLOCK)
    lists = Lists(entries, target, plan, level, order, high_count, low_count, rows, width, columns, past)
    earned, rank = level_and_rank(lists, row, token, token < past)
    sinks = (token < tl.load(high_count + row)) & (earned == LOW_LEVEL)
    if tl.sum(sinks.to(tl.int32), 0) > 0:
        at, to = place_of(lists, row, token, sinks, HIGH, 0), target_of(lists, row, rank, sinks, LOW, 1)
        store_tile(read_high(pages, at, HIGH, LOW, True, DTYPE), pages, to, feedback, row, LOW, True, DTYPE)
        store_tile(read_high(pages, at, HIGH, LOW, False, DTYPE), pages, to, None, row, LOW, False, DTYPE)
        base = pages + at.page * HIGH.page_bytes
        score = load_scores(base + HIGH.score_offset, at.slot, sinks, HIGH.score_bytes)
        position = load_positions(base + HIGH.position_offset, at.slot, sinks, HIGH.position_bytes)
        store_scalars(pages, to, score, position, LOW)


@triton.jit
def close_tier(pages, lists, row, index, rank, kept, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Moves forward a tier's kept tokens `index` that lie beyond the row's new end."""
    moves = kept & (index >= count_after(lists.plan, row, lists.rows, IS_LOW))
    if tl.sum(moves.to(tl.int32), 0) > 0:
        added = tl.load(lists.plan + (ADDED + IS_LOW) * lists.rows + row)
        at, to = (
            place_of(lists, row, index, moves, TIER, IS_LOW),
            target_of(lists, row, rank + added, moves, TIER, IS_LOW),
        )
        source, goal = pages + at.page * TIER.page_bytes, pages + to.page * TIER.page_bytes
        copy_tile(source, goal, at.slot, to.slot, moves, TIER)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "width", "columns", "past"])
def close_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, rows, width, columns, past,
    HIGH: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves forward the kept tokens beyond the new end. Grid: (cdiv(past, BLOCK), heads, batch)."""
    row, token = row_and_place(BLOCK)
    lists = Lists(entries, target, plan, level, order, high_count, low_count, rows, width, columns, past)
    earned, rank = level_and_rank(lists, row, token, token < past)
    is_high, is_low, high, _ = kinds(high_count, low_count, row, token)
    close_tier(pages, lists, row, token, rank, is_high & (earned == HIGH_LEVEL), HIGH, 0)
    close_tier(pages, lists, row, token - high, rank, is_low & (earned == LOW_LEVEL), LOW, 1)


@triton.jit
def targets(lists, row, column, there, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Returns the targets of exact tokens that become high, and of those that become low."""
    earned, rank = level_and_rank(lists, row, column, there)
    high = target_of(lists, row, rank, earned == HIGH_LEVEL, HIGH, 0)
    return high, target_of(lists, row, rank, earned == LOW_LEVEL, LOW, 1)


@triton.jit(
    do_not_specialize=[*LAYER, "window_score", "rows", "heads", "width", "columns", "past", "slots", "sink_slots"]
)
def level_window_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, window_key, window_value, window_score, length,
    window_start, sink_end, shift, feedback, rows, heads, width, columns, past, slots, sink_slots,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores tokens that leave the window at their level. Grid: (cdiv(slots, BLOCK), heads, batch).

    Args:
        shift, feedback: arguments of `leave_tile`.
    """
    row, slot = row_and_place(BLOCK)
    request = row // heads
    begin, sinks = tl.load(window_start + request), tl.load(sink_end + request)
    token, there = token_in_slot(slot, begin, tl.load(length + request), sinks, sink_slots, slots)
    column = tl.where(token < sinks, token, token - begin + sinks)
    column += tl.load(high_count + row) + tl.load(low_count + row)
    lists = Lists(entries, target, plan, level, order, high_count, low_count, rows, width, columns, past)
    high, low = targets(lists, row, column, there, HIGH, LOW)
    stays, slot = there & ~high.active & ~low.active, slot + row.to(tl.int64) * slots
    leave_tile(pages, high, window_key, window_value, window_score, slot, token, there, None, shift, feedback, row,
               HIGH, DTYPE)  # fmt: skip
    leave_tile(pages, low, window_key, window_value, window_score, slot, token, there, stays, shift, feedback, row,
               LOW, DTYPE)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *(*LAYER, "window_score"),
        *("rank", "count", "rows", "heads", "width", "columns", "past", "tokens", "window", "slots", "sink_slots"),
        *("key_batch", "key_head", "key_token", "value_batch", "value_head", "value_token"),
    ]
)
def level_new_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, window_key, window_value, window_score, length,
    window_start, sink_end, invalid, key, value, received, rank, count, key_matrix, value_matrix, offset, feedback,
    limit, rows, heads, width, columns, past, tokens, window, slots, sink_slots,
    key_batch, key_head, key_token, value_batch, value_head, value_token,
    HIGH: tl.constexpr, LOW: tl.constexpr, KEY_ROOT: tl.constexpr, VALUE_ROOT: tl.constexpr,
    INNER: tl.constexpr, DTYPE: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores new tokens at their level or in the window. Grid: (cdiv(tokens, BLOCK), heads, batch).

    Arguments are as in `store_new_kernel` and `decide_kernel`.
    """
    row, token = row_and_place(BLOCK)
    request, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    real, position, sinks, start, _ = new_tokens(
        token, rank, count, length, window_start, sink_end, request, tokens, window
    )
    stays = real & ((position < sinks) | (position >= start))
    keys = key + request * key_batch + head * key_head + token.to(tl.int64) * key_token
    values = value + request * value_batch + head * value_head + token.to(tl.int64) * value_token
    new = Incoming(keys, values, key_matrix, value_matrix, offset, feedback, None, limit)
    slot = slot_of(position, sinks, row, slots, sink_slots)
    exact = WindowSlots(window_key, window_value, window_score, slot, stays, invalid)
    score = tl.load(received + row.to(tl.int64) * columns + past + token, mask=real, other=0.0)
    lists = Lists(entries, target, plan, level, order, high_count, low_count, rows, width, columns, past)
    high, low = targets(lists, row, past + token, real, HIGH, LOW)
    enter_tile(pages, high, new, exact, real, score, position, row, HIGH, KEY_ROOT, VALUE_ROOT, INNER, DTYPE, OPERAND)
    if tl.sum(low.active.to(tl.int32), 0) > 0:
        enter_tile(pages, low, new, None, low.active, score, position, row, LOW, KEY_ROOT, VALUE_ROOT, INNER, DTYPE,
                   OPERAND)  # fmt: skip
