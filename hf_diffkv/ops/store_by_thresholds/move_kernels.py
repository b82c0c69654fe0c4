"""Where stored tokens go once levels are decided (Triton); see `kernels.py`.

Tiles are those of `quantize/kernels.py`, [tokens, planes, bytes of a plane].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import load_positions, load_scores
from ..quantize.copy_kernel import copy_rows
from ..quantize.kernels import read_tile, rows_at, tier_dims, write_scalars
from ..rounding import reference
from ..store_uniform.token_kernels import page_tile, round_keys_tile
from .kernels import ADDED, COUNTS, HIGH_LEVEL, KEPT, LOW_LEVEL, PADDING_LEVEL, kinds

MOST_BITS = tl.constexpr(reference.LARGEST_BITS)


@triton.jit
def place_of(entries, row, width, index, active, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Pages (int64) and slots of a row's tokens `index`."""
    entry = entries + (row.to(tl.int64) * 2 + IS_LOW) * width + index // TIER.capacity
    return tl.load(entry, mask=active, other=0).to(tl.int64), index % TIER.capacity


@triton.jit
def target_of(entries, target, plan, high_count, low_count, row, rows, rank, active, width, past, TIER: tl.constexpr,
              IS_LOW: tl.constexpr):  # fmt: skip
    """Pages and slots that the free slot `rank` of a row's tier is."""
    kept = tl.load(plan + (KEPT + IS_LOW) * rows + row)
    high = tl.load(high_count + row)
    first = high if IS_LOW else 0
    inside = (tl.load(low_count + row) if IS_LOW else high) - kept
    listed = tl.load(target + row.to(tl.int64) * past + first + rank, mask=active & (rank < inside), other=0)
    index = tl.where(rank < inside, listed, rank + kept)
    return place_of(entries, row, width, index, active, TIER, IS_LOW)


@triton.jit
def copy_tile(pages, from_page, from_slot, to_page, to_slot, active, TIER: tl.constexpr):
    """Copies tokens within a tier as they are stored."""
    source = pages + from_page * TIER.page_bytes
    target = pages + to_page * TIER.page_bytes
    copy_rows(source, target, from_slot, to_slot, active, TIER.key_offset, TIER.key_row)
    copy_rows(source, target, from_slot, to_slot, active, TIER.value_offset, TIER.value_row)
    if TIER.k_bits < 16:
        BYTES: tl.constexpr = TIER.key_metadata * TIER.k_groups
        copy_rows(source, target, from_slot, to_slot, active, TIER.key_metadata_offset, BYTES)
    if TIER.v_bits < 16:
        SIZE: tl.constexpr = TIER.value_metadata * TIER.v_groups
        copy_rows(source, target, from_slot, to_slot, active, TIER.value_metadata_offset, SIZE)
    copy_rows(source, target, from_slot, to_slot, active, TIER.score_offset, TIER.score_bytes)
    copy_rows(source, target, from_slot, to_slot, active, TIER.position_offset, TIER.position_bytes)


@triton.jit
def numbers_tile(pages, page, slot, score, position, active, TIER: tl.constexpr):
    """Writes scores and positions."""
    write_scalars(pages + page * TIER.page_bytes, slot, score, position, active, TIER)


@triton.jit
def stored_key(x, pages, page, slot, feedback, row, active, TIER: tl.constexpr, DTYPE: tl.constexpr):
    """Quantises a tile of keys of one row, rounded by `feedback` where that is given and bits are few."""
    if feedback is not None and TIER.k_bits <= MOST_BITS:
        x = round_keys_tile(x, feedback, row, TIER)
    page_tile(x, pages, page, slot, active, TIER, True, DTYPE)


@triton.jit
def demoted_tile(pages, from_page, from_slot, active, HIGH: tl.constexpr, LOW: tl.constexpr, IS_KEY: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """Keys or values of high tokens, in the order that their low tier is packed in."""
    codes, metadata = rows_at(pages + from_page * HIGH.page_bytes, from_slot, HIGH, IS_KEY)
    dim, exists = tier_dims(LOW, IS_KEY)
    return read_tile(codes, metadata, active, dim, exists, HIGH, IS_KEY, DTYPE)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "width", "columns", "past"])
def demote_kernel(
    pages, entries, target, plan, level, order, high_count, low_count, feedback, rows, width, columns, past,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, cdiv(past, BLOCK)). feedback: float32 [rows, key_dim, key_dim] that keys are rounded with
    (ops/rounding), or None."""
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
        copy_tile(pages, page, slot, to_page, to_slot, moves, LOW)
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
    """Grid: (rows, cdiv(past, BLOCK))."""
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
        copy_tile(pages, page, slot, to_page, to_slot, moves, HIGH)
