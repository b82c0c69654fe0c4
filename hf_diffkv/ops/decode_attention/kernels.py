"""Decode attention over pages and window (Triton), split along the sequence; `finish_kernel.py` merges the splits.

With key = scale * code + zero (DiffKV, SOSP 2025, section 5),
    logit = scale * (query . code) + zero * sum(query),   output = sum(p * scale * code) + sum(p * zero).

Work is divided into blocks of BLOCK tokens: high tier, then low tier, then window. Each split of a row takes an equal
share of its blocks, computed from the counts on the device. Logits are in units of log2. If pages have scores, the
running peak and the logits relative to it are stored after each block, or every STEP tokens in the window. fp16 is
precise enough for these, because the larger the probability, the smaller the number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import (
    STEP,
    blocks_of,
    columns,
    join_totals,
    no_tokens,
    row_counts,
    softmax_step,
    store_logits,
    store_peak,
    store_split,
    window_slots,
)
from .tier_math import (
    add_raw_values,
    add_tier_values,
    add_zeros,
    as_multiplied,
    convert,
    in_order,
    key_tiles,
    load_query,
    load_rows,
    narrow_words,
    no_zeros,
    padded,
    page_offset,
    query_sums,
    tier_products,
    tier_words,
    tile_pieces,
)


@triton.jit
def attend_tier(state, query_row, heads, pages, table, logits, peaks, first, last, count, logit_scale, cap,
                DIRECTION: tl.constexpr, TIER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                ELEMENT: tl.constexpr, OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Attends to blocks [first, last) of a tier of `count` tokens.

    `table` points to the tier's first entry; `logits` and `peaks` point to the entries of its first block. Tokens past
    the end repeat the last one and are masked by their logit, so that no load needs a mask.
    """
    old_peak, total, acc = state
    acc = as_multiplied(acc, TIER, MODE)
    peak = old_peak
    query = load_query(
        query_row, heads, TIER.key_dim, TIER.key_dim, key_tiles(TIER, MODE), tile_pieces(TIER, MODE), GROUP,
        RAW if TIER.k_bits == 16 else OPERAND,
    )  # fmt: skip
    sums, biases = query_sums(query, TIER, MODE)
    lane = tl.arange(0, BLOCK)
    weight_sums = tl.zeros((BLOCK, heads.shape[0]), tl.float32)
    zeros = no_zeros(TIER, BLOCK, heads.shape[0])
    # page numbers are loaded one block ahead, because Triton prefetches rows only if it already knows their page;
    # metadata too narrow for such copies is loaded one block ahead as well
    AHEAD: tl.constexpr = narrow_words(TIER)
    begin = tl.minimum(first * BLOCK + lane, tl.maximum(count - 1, 0))
    page = tl.load(table + DIRECTION * (begin // TIER.capacity), mask=begin < count, other=0)
    if AHEAD:
        first_base = pages + page_offset(page, TIER.page_bytes, MODE)
        words = tier_words(first_base, begin % TIER.capacity, begin < count, TIER)
    for block in range(first, last):
        token = block * BLOCK + lane
        present = token < count
        slot = tl.minimum(token, count - 1) % TIER.capacity
        following = tl.minimum(token + BLOCK, count - 1)
        next_page = tl.load(table + DIRECTION * (following // TIER.capacity))
        base = pages + page_offset(page, TIER.page_bytes, MODE)
        if AHEAD:
            next_base = pages + page_offset(next_page, TIER.page_bytes, MODE)
            next_words = tier_words(next_base, following % TIER.capacity, None, TIER)
        else:
            words = tier_words(base, slot, None, TIER)
        products = tier_products(base, slot, words[0], query, sums, biases, TIER, ELEMENT, OPERAND, RAW, MODE)
        peak, weight_sums, decay, weights, shifted = softmax_step(
            peak, weight_sums, products, present, logit_scale, cap
        )
        store_logits(logits, token, heads, shifted, present, GROUP)
        store_peak(peaks, block, heads, peak, GROUP)
        acc, zeros = add_tier_values(
            acc, zeros, base, slot, words[1], weights, decay, TIER, ELEMENT, OPERAND, RAW, MODE
        )
        page = next_page
        if AHEAD:
            words = next_words
    acc = in_order(acc, TIER, MODE)
    return peak, join_totals(old_peak, total, peak, weight_sums), add_zeros(acc, zeros, TIER)


@triton.jit
def attend_window(state, query_row, heads, keys, values, logits, peaks, first, last, count, place, slots,
                  sink_slots, logit_scale, cap, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr,
                  RAW: tl.constexpr):  # fmt: skip
    """Attends to tokens [first, last) of the window, `first` a multiple of STEP; arguments as in `attend_tier`."""
    old_peak, total, acc = state
    peak = old_peak
    query = load_query(query_row, heads, KEY_DIM, KEY_DIM, 1, 1, GROUP, RAW)
    lane = tl.arange(0, STEP)
    weight_sums = tl.zeros((STEP, heads.shape[0]), tl.float32)
    for start in range(first, last, STEP):
        token = start + lane
        present = token < count
        slot = window_slots(tl.minimum(token, count - 1), place, slots, sink_slots)
        rows = load_rows(keys + slot * KEY_DIM, KEY_DIM, padded(KEY_DIM))
        products = tl.dot(convert(rows, RAW), query[0], input_precision="ieee")
        peak, weight_sums, decay, weights, shifted = softmax_step(
            peak, weight_sums, products, present, logit_scale, cap
        )
        store_logits(logits, token, heads, shifted, present, GROUP)
        store_peak(peaks, start // STEP, heads, peak, GROUP)
        acc = add_raw_values(acc, values + slot * VALUE_DIM, weights, decay, VALUE_DIM, RAW)
    return peak, join_totals(old_peak, total, peak, weight_sums), acc


# without this, Triton would recompile for sizes, and for addresses of single layers, that are multiples of 16
@triton.jit(
    do_not_specialize=[
        *("page_table", "high_count", "low_count", "window_start", "length", "valid", "sink_end"),
        *("table_width", "kv_heads", "slots", "sink_slots", "splits", "positions", "blocks"),
    ]
)
def attend_kernel(
    query, pages, page_table, high_count, low_count, window_key, window_value, window_start, length, valid,
    sink_end, partial_output, partial_peak, partial_total, logits, block_peak, logit_scale, cap,
    table_width, kv_heads, slots, sink_slots, splits, positions, blocks,
    HIGH: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr, ONE_TIER: tl.constexpr,
):  # fmt: skip
    """Attends to one split of one row (request, KV head). Grid: (rows, splits).

    Args:
        query: [rows, GROUP, key_dim].
        pages: uint8.
        page_table: int32 [rows, table_width].
        high_count, low_count: int32 [rows].
        window_key, window_value: [rows, slots, dim].
        window_start, length: int64 [batch].
        valid: uint8 [batch] or None.
        sink_end: int64 [batch] or None.
        partial_output: float32 [rows, splits, GROUP, value_dim].
        partial_peak, partial_total: float32 [rows, splits, GROUP]; the peak of a split without tokens is -inf, and its
            output is not written.
        logits: high blocks, low blocks, then window steps, fp16 [rows, positions, columns(GROUP)]; None without scores.
        block_peak: peaks in the same order, float32 [rows, blocks, columns(GROUP)]; None without scores.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    KEY_DIM: tl.constexpr = HIGH.key_dim
    VALUE_DIM: tl.constexpr = HIGH.value_dim
    COLUMNS: tl.constexpr = columns(GROUP)
    ELEMENT: tl.constexpr = query.dtype.element_ty
    high, low, window, place = row_counts(
        high_count, low_count, window_start, length, valid, sink_end, row, row // kv_heads, slots, sink_slots
    )
    high_blocks, paged_blocks, first, last = blocks_of(high, low, window, split, splits, MIN_BLOCKS, BLOCK)

    wide_row = row.to(tl.int64)
    heads = tl.arange(0, HEADS)
    query_row = query + wide_row * (GROUP * KEY_DIM)
    table = page_table + wide_row * table_width
    SCORED: tl.constexpr = logits is not None
    row_logits = logits
    row_peaks = block_peak
    low_logits = logits
    low_peaks = block_peak
    window_logits = logits
    window_peaks = block_peak
    if SCORED:
        row_logits += wide_row * positions * COLUMNS
        row_peaks += wide_row * blocks * COLUMNS
        low_logits = row_logits + high_blocks * BLOCK * COLUMNS
        low_peaks = row_peaks + high_blocks * COLUMNS
        window_logits = row_logits + paged_blocks * BLOCK * COLUMNS
        window_peaks = row_peaks + paged_blocks * COLUMNS
    state = no_tokens(HEADS, VALUE_DIM)
    state = attend_tier(
        state, query_row, heads, pages, table, row_logits, row_peaks, tl.minimum(first, high_blocks),
        tl.minimum(last, high_blocks), high, logit_scale, cap, 1, HIGH, GROUP, BLOCK, ELEMENT, OPERAND, RAW, MODE,
    )  # fmt: skip
    if not ONE_TIER:
        state = attend_tier(
            state, query_row, heads, pages, table + table_width - 1, low_logits, low_peaks,
            tl.maximum(first - high_blocks, 0), tl.minimum(last, paged_blocks) - high_blocks, low, logit_scale, cap,
            -1, LOW, GROUP, BLOCK, ELEMENT, OPERAND, RAW, MODE,
        )  # fmt: skip
    state = attend_window(
        state, query_row, heads, window_key + wide_row * slots * KEY_DIM, window_value + wide_row * slots * VALUE_DIM,
        window_logits, window_peaks,
        tl.maximum(first - paged_blocks, 0) * BLOCK, tl.minimum((last - paged_blocks) * BLOCK, window), window,
        place, slots, sink_slots, logit_scale, cap, KEY_DIM, VALUE_DIM, GROUP, RAW,
    )  # fmt: skip
    store_split(
        state, partial_output, partial_peak, partial_total, wide_row * splits + split, heads, first < last, GROUP,
        VALUE_DIM,
    )  # fmt: skip
