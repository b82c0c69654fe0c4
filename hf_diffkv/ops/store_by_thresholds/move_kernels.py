"""Triton kernels that move stored, exact and new tokens after their levels are decided; see `kernels.py`.

Tiles are [tokens, planes, bytes of a plane], as in `quantize/kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import load_positions, load_scores
from ..quantize.kernels import copy_tile, read_tile, rows_at, tier_dims, write_scalars
from ..rotation_kernel import rounded
from ..store_uniform.kernels import (
    keep_tile,
    less,
    new_tile,
    new_tokens,
    page_tile,
    slot_of,
    stored_key,
    token_in_slot,
    window_tile,
)
from .kernels import ADDED, COUNTS, HIGH_LEVEL, KEPT, LAYER, LOW_LEVEL, PADDING_LEVEL, kinds


@triton.jit
def place_of(entries, row, width, index, active, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns pages (int64) and slots of a row's tokens `index`."""
    entry = entries + (row.to(tl.int64) * 2 + IS_LOW) * width + index // TIER.capacity
    return tl.load(entry, mask=active, other=0).to(tl.int64), index % TIER.capacity


@triton.jit
def target_of(entries, target, plan, high_count, low_count, row, rows, rank, active, width, past, TIER: tl.constexpr,
              IS_LOW: tl.constexpr):  # fmt: skip
    """Returns page and slot of the `rank`-th free slot of a row's tier."""
    kept = tl.load(plan + (KEPT + IS_LOW) * rows + row)
    high = tl.load(high_count + row)
    first = high if IS_LOW else 0
    inside = (tl.load(low_count + row) if IS_LOW else high) - kept
    listed = tl.load(target + row.to(tl.int64) * past + first + rank, mask=active & (rank < inside), other=0)
    index = tl.where(rank < inside, listed, rank + kept)
    return place_of(entries, row, width, index, active, TIER, IS_LOW)


@triton.jit
def numbers_tile(pages, page, slot, score, position, active, TIER: tl.constexpr):
    """Writes scores and positions."""
    write_scalars(pages + page * TIER.page_bytes, slot, score, position, active, TIER)


@triton.jit
def demoted_tile(pages, from_page, from_slot, active, HIGH: tl.constexpr, LOW: tl.constexpr, IS_KEY: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """Reads keys or values of high tokens, in the order in which the low tier is packed."""
    codes, metadata = rows_at(pages + from_page * HIGH.page_bytes, from_slot, HIGH, IS_KEY)
    dim, exists = tier_dims(LOW, IS_KEY)
    return read_tile(codes, metadata, active, dim, exists, HIGH, IS_KEY, DTYPE)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "width", "columns", "past"])
def demote_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, feedback, rows, width, columns, past,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Demotes high tokens, and moves low tokens beyond the new end forward. Grid: (rows, cdiv(past, BLOCK)).

    Args:
        feedback: matrices by which keys are rounded (ops/rounding), float32 [rows, key_dim, key_dim], or None.
    """
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    earned = tl.load(level + row.to(tl.int64) * columns + token, mask=token < past, other=PADDING_LEVEL)
    rank = tl.load(order + row.to(tl.int64) * columns + token, mask=token < past, other=0)
    is_high, is_low, high, _ = kinds(high_count, low_count, row, token)
    added = tl.load(plan + (ADDED + 1) * rows + row)
    after = tl.load(plan + (KEPT + 1) * rows + row) + added
    sinks = is_high & (earned == LOW_LEVEL)
    moves = is_low & (earned == LOW_LEVEL) & (token - high >= after)
    if tl.sum((sinks | moves).to(tl.int32), 0) > 0:
        rank = tl.where(moves, rank + added, rank)
        to_page, to_slot = target_of(
            entries, target, plan, high_count, low_count, row, rows, rank, sinks | moves, width, past, LOW, 1
        )
        page, slot = place_of(entries, row, width, token - high, moves, LOW, 1)
        source, target_page = pages + page * LOW.page_bytes, pages + to_page * LOW.page_bytes
        copy_tile(source, target_page, slot, to_slot, moves, LOW)
        page, slot = place_of(entries, row, width, token, sinks, HIGH, 0)
        x = demoted_tile(pages, page, slot, sinks, HIGH, LOW, True, DTYPE)
        stored_key(x, pages, to_page, to_slot, feedback, row, sinks, LOW, DTYPE)
        x = demoted_tile(pages, page, slot, sinks, HIGH, LOW, False, DTYPE)
        page_tile(x, pages, to_page, to_slot, sinks, LOW, False, DTYPE)
        base = pages + page * HIGH.page_bytes
        score = load_scores(base + HIGH.score_offset, slot, sinks, HIGH.score_bytes)
        position = load_positions(base + HIGH.position_offset, slot, sinks, HIGH.position_bytes)
        numbers_tile(pages, to_page, to_slot, score, position, sinks, LOW)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "width", "columns", "past"])
def close_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, rows, width, columns, past,
    HIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves high tokens beyond the new end forward. Grid: (rows, cdiv(past, BLOCK))."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    earned = tl.load(level + row.to(tl.int64) * columns + token, mask=token < past, other=PADDING_LEVEL)
    rank = tl.load(order + row.to(tl.int64) * columns + token, mask=token < past, other=0)
    added = tl.load(plan + ADDED * rows + row)
    after = tl.load(plan + KEPT * rows + row) + added
    moves = (token < tl.load(high_count + row)) & (earned == HIGH_LEVEL) & (token >= after)
    if tl.sum(moves.to(tl.int32), 0) > 0:
        to_page, to_slot = target_of(
            entries, target, plan, high_count, low_count, row, rows, rank + added, moves, width, past, HIGH, 0
        )
        page, slot = place_of(entries, row, width, token, moves, HIGH, 0)
        source, target_page = pages + page * HIGH.page_bytes, pages + to_page * HIGH.page_bytes
        copy_tile(source, target_page, slot, to_slot, moves, HIGH)


@triton.jit
def targets(
    entries, target, plan, level, order, high_count, low_count, row, rows, column, there, width, columns, past,
    HIGH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Returns which exact tokens become high and low, and their target page and slot in each tier."""
    place = row.to(tl.int64) * columns + column
    earned = tl.load(level + place, mask=there, other=PADDING_LEVEL)
    is_high, is_low = there & (earned == HIGH_LEVEL), there & (earned == LOW_LEVEL)
    rank = tl.load(order + place, mask=is_high | is_low, other=0)
    high_page, high_slot = target_of(
        entries, target, plan, high_count, low_count, row, rows, rank, is_high, width, past, HIGH, 0
    )
    low_page, low_slot = target_of(
        entries, target, plan, high_count, low_count, row, rows, rank, is_low, width, past, LOW, 1
    )
    return is_high, high_page, high_slot, is_low, low_page, low_slot


@triton.jit(
    do_not_specialize=[*LAYER, "window_score", "rows", "heads", "width", "columns", "past", "slots", "sink_slots"]
)
def level_window_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, window_key, window_value, window_score, length,
    window_start, sink_end, shift, feedback, rows, heads, width, columns, past, slots, sink_slots,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores tokens that leave the window at their level. Grid: (rows, cdiv(slots, BLOCK)).

    Args:
        shift: offset to subtract from all keys that were in the window, float32 [rows, key_dim], or None.
        feedback: matrices by which keys are rounded, as in `demote_kernel`.
    """
    row = tl.program_id(0)
    request = row // heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, sinks = tl.load(window_start + request), tl.load(sink_end + request)
    token, there = token_in_slot(slot, begin, tl.load(length + request), sinks, sink_slots, slots)
    column = tl.where(token < sinks, token, token - begin + sinks)
    column += tl.load(high_count + row) + tl.load(low_count + row)
    is_high, high_page, high_slot, is_low, low_page, low_slot = targets(
        entries, target, plan, level, order, high_count, low_count, row, rows, column, there, width, columns, past,
        HIGH, LOW,
    )  # fmt: skip
    place = slot + row.to(tl.int64) * slots

    x = window_tile(window_key, place, there, HIGH, True)
    if shift is not None:
        x = rounded(less(x, shift, row, HIGH), DTYPE)
    stored_key(x, pages, high_page, high_slot, feedback, row, is_high, HIGH, DTYPE)
    stays = there & ~is_high & ~is_low
    x = window_tile(window_value, place, is_high, HIGH, False)
    page_tile(x, pages, high_page, high_slot, is_high, HIGH, False, DTYPE)

    x = window_tile(window_key, place, there, LOW, True)
    if shift is not None:
        x = rounded(less(x, shift, row, LOW), DTYPE)
        # this program alone reads its tokens, and has read them completely before it writes the remaining ones
        tl.debug_barrier()
        keep_tile(x, window_key, place, stays, LOW, True, DTYPE)
    stored_key(x, pages, low_page, low_slot, feedback, row, is_low, LOW, DTYPE)
    x = window_tile(window_value, place, is_low, LOW, False)
    page_tile(x, pages, low_page, low_slot, is_low, LOW, False, DTYPE)

    score = tl.load(window_score + place, mask=is_high | is_low, other=0.0)
    numbers_tile(pages, high_page, high_slot, score, token, is_high, HIGH)
    numbers_tile(pages, low_page, low_slot, score, token, is_low, LOW)


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
    """Stores new tokens at their level or in the window. Grid: (rows, cdiv(tokens, BLOCK)).

    Arguments as in `store_new_kernel` and `decide_kernel`.
    """
    row = tl.program_id(0)
    request, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, position, sinks, stays = new_tokens(
        token, rank, count, length, window_start, sink_end, request, tokens, window
    )
    slot = slot_of(position, sinks, row, slots, sink_slots)
    is_high, high_page, high_slot, is_low, low_page, low_slot = targets(
        entries, target, plan, level, order, high_count, low_count, row, rows, past + token, real, width, columns, past,
        HIGH, LOW,
    )  # fmt: skip

    keys = key + request * key_batch + head * key_head + token.to(tl.int64) * key_token
    x, good = new_tile(keys, real, key_matrix, limit, KEY_ROOT, HIGH, True, INNER, OPERAND)
    if offset is not None:
        x = less(x, offset, row, HIGH)
    x = rounded(x, DTYPE)
    keep_tile(x, window_key, slot, stays, HIGH, True, DTYPE)
    stored_key(x, pages, high_page, high_slot, feedback, row, is_high, HIGH, DTYPE)
    values = value + request * value_batch + head * value_head + token.to(tl.int64) * value_token
    x, fine = new_tile(values, real, value_matrix, limit, VALUE_ROOT, HIGH, False, INNER, OPERAND)
    x = rounded(x, DTYPE)
    keep_tile(x, window_value, slot, stays, HIGH, False, DTYPE)
    page_tile(x, pages, high_page, high_slot, is_high, HIGH, False, DTYPE)
    wrong = tl.sum((real & ~(good & fine)).to(tl.int32), 0)
    tl.store(invalid, 1, mask=wrong > 0)

    if tl.sum(is_low.to(tl.int32), 0) > 0:
        low_key, low_good = new_tile(keys, is_low, key_matrix, limit, KEY_ROOT, LOW, True, INNER, OPERAND)
        if offset is not None:
            low_key = less(low_key, offset, row, LOW)
        low_key = rounded(low_key, DTYPE)
        stored_key(low_key, pages, low_page, low_slot, feedback, row, is_low, LOW, DTYPE)
        low_value, low_fine = new_tile(values, is_low, value_matrix, limit, VALUE_ROOT, LOW, False, INNER, OPERAND)
        page_tile(rounded(low_value, DTYPE), pages, low_page, low_slot, is_low, LOW, False, DTYPE)

    score = tl.load(received + row.to(tl.int64) * columns + past + token, mask=real, other=0.0)
    tl.store(window_score + slot, score, mask=stays)
    numbers_tile(pages, high_page, high_slot, score, position, is_high, HIGH)
    numbers_tile(pages, low_page, low_slot, score, position, is_low, LOW)
