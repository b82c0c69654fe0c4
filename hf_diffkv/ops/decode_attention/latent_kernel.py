"""Decode attention with absorbed queries over latents (store/latent.py) in Triton, split as in `kernels.py`.

Keys are rotary keys, and values are latents, which also enter the logits. With latent = scale * code + zero,
    logit = rotary query . key + scale * (latent query . code) + zero * sum(latent query).
All query heads read the same row. A program takes HEADS of them at once, so that the accumulators fit its registers,
and loads the codes of a latent once for both products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import (
    STEP,
    blocks_of,
    join_totals,
    no_tokens,
    row_counts,
    softmax_step,
    store_split,
    window_slots,
)
from .tier_math import (
    add_zeros,
    convert,
    key_tiles,
    load_query,
    load_rows,
    metadata_of,
    no_zeros,
    padded,
    page_offset,
    query_sums,
    scaled_weights,
    tier_products,
    tier_words,
    tile_pieces,
    value_quarters,
    weight_gain,
    zero_groups,
)


@triton.jit
def raw_quarters(rows, DIM: tl.constexpr, RAW: tl.constexpr):
    """Loads rows (pointers [tokens]) in the model's dtype as four quarters [tokens, padded(QUARTER)]."""
    QUARTER: tl.constexpr = DIM // 4
    quarters = ()
    for part in tl.static_range(4):
        quarters = quarters + (convert(load_rows(rows + part * QUARTER, QUARTER, padded(QUARTER)), RAW),)
    return quarters


@triton.jit
def latent_quarters(base, slot, TIER: tl.constexpr, ELEMENT: tl.constexpr, OPERAND: tl.constexpr, RAW: tl.constexpr,
                    MODE: tl.constexpr):  # fmt: skip
    """Loads the codes (at 16 bits, the numbers) of the latents in `slot` of the pages at `base`.

    Returns four quarters [tokens, padded(QUARTER)].
    """
    rows = base + TIER.value_offset + slot * TIER.value_row
    if TIER.v_bits == 16:
        return raw_quarters(rows.to(tl.pointer_type(ELEMENT)), TIER.value_dim, RAW)
    else:
        return value_quarters(rows, TIER, True, OPERAND, MODE)


@triton.jit
def add_products(products, quarters, query, first, COUNT: tl.constexpr):
    """Returns `products` [tokens, HEADS] plus those of COUNT quarters of latents and query, starting at `first`."""
    for part in tl.static_range(COUNT):
        products = tl.dot(quarters[first + part], query[first + part], products, input_precision="ieee")
    return products


@triton.jit
def add_latents(acc, quarters, weights, decay, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Returns acc * decay + latents^T weights for COUNT quarters, starting at FIRST."""
    out = ()
    for part in tl.static_range(FIRST, FIRST + COUNT):
        before = acc[part] * decay[None, :]
        out = out + (tl.dot(tl.trans(quarters[part]), weights, before, input_precision="ieee"),)
    return out


@triton.jit
def times(acc, FACTOR: tl.constexpr):
    """Returns the output's quarters times FACTOR."""
    return (acc[0] * FACTOR, acc[1] * FACTOR, acc[2] * FACTOR, acc[3] * FACTOR)


@triton.jit
def attend_tier(state, query_row, heads, pages, table, first, last, count, logit_scale, cap,
                DIRECTION: tl.constexpr, TIER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                ELEMENT: tl.constexpr, OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Attends to blocks [first, last) of a tier of `count` tokens; arguments as in `kernels.py`."""
    old_peak, total, acc = state
    acc = times(acc, weight_gain(TIER))
    peak = old_peak
    GROUPS: tl.constexpr = zero_groups(TIER)
    NUMBERS: tl.constexpr = RAW if TIER.v_bits == 16 else OPERAND
    query = load_query(
        query_row, heads, TIER.key_dim + TIER.value_dim, TIER.key_dim, key_tiles(TIER, MODE), tile_pieces(TIER, MODE),
        GROUP, RAW if TIER.k_bits == 16 else OPERAND,
    )  # fmt: skip
    sums, biases = query_sums(query, TIER, MODE)
    latent_query = load_query(
        query_row + TIER.key_dim, heads, TIER.key_dim + TIER.value_dim, TIER.value_dim, 4, 1, GROUP, NUMBERS
    )
    latent_sums = ()
    for group in tl.static_range(GROUPS):
        part_sum = tl.zeros((heads.shape[0],), tl.float32)
        for part in tl.static_range(group * (4 // GROUPS), (group + 1) * (4 // GROUPS)):
            part_sum += tl.sum(latent_query[part].to(tl.float32), 0)
        latent_sums = latent_sums + (part_sum,)
    lane = tl.arange(0, BLOCK)
    weight_sums = tl.zeros((BLOCK, heads.shape[0]), tl.float32)
    zeros = no_zeros(TIER, BLOCK, heads.shape[0])
    begin = tl.minimum(first * BLOCK + lane, tl.maximum(count - 1, 0))
    page = tl.load(table + DIRECTION * (begin // TIER.capacity), mask=begin < count, other=0)
    for block in range(first, last):
        token = block * BLOCK + lane
        # tokens past the end repeat the last one, so that no load needs a mask
        slot = tl.minimum(token, count - 1) % TIER.capacity
        following = tl.minimum(token + BLOCK, count - 1)
        next_page = tl.load(table + DIRECTION * (following // TIER.capacity))
        base = pages + page_offset(page, TIER.page_bytes, MODE)
        words = tier_words(base, slot, None, TIER)
        products = tier_products(base, slot, words[0], query, sums, biases, TIER, ELEMENT, OPERAND, RAW, MODE)
        quarters = latent_quarters(base, slot, TIER, ELEMENT, OPERAND, RAW, MODE)
        if GROUPS == 0:
            products = add_products(products, quarters, latent_query, 0, 4)
        metadata = ()
        for group in tl.static_range(GROUPS):
            pair = metadata_of(words[1][group], TIER.value_metadata, TIER.v_bits)
            metadata = metadata + (pair,)
            raw = tl.zeros((BLOCK, heads.shape[0]), tl.float32)
            raw = add_products(raw, quarters, latent_query, group * (4 // GROUPS), 4 // GROUPS)
            products += raw * pair[0][:, None] + pair[1][:, None] * latent_sums[group][None, :]
        peak, weight_sums, decay, weights, _ = softmax_step(
            peak, weight_sums, products, token < count, logit_scale, cap
        )
        if GROUPS == 0:
            acc = add_latents(acc, quarters, weights.to(NUMBERS), decay, 0, 4)
        else:
            out = ()
            zeros_out = ()
            for group in tl.static_range(GROUPS):
                scale, zero = metadata[group]
                zeros_out = zeros_out + (zeros[group] * decay[None, :] + weights * zero[:, None],)
                scaled = scaled_weights(weights, scale, TIER, OPERAND)
                out = out + add_latents(acc, quarters, scaled, decay, group * (4 // GROUPS), 4 // GROUPS)
            acc = out
            zeros = zeros_out
        page = next_page
    acc = times(acc, 1.0 / weight_gain(TIER))
    return peak, join_totals(old_peak, total, peak, weight_sums), add_zeros(acc, zeros, TIER)


@triton.jit
def attend_window(state, query_row, heads, keys, latents, first, last, count, place, slots, sink_slots, logit_scale,
                  cap, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr,
                  RAW: tl.constexpr):  # fmt: skip
    """Attends to tokens [first, last) of the window; arguments as in `kernels.py`."""
    old_peak, total, acc = state
    peak = old_peak
    query = load_query(query_row, heads, KEY_DIM + VALUE_DIM, KEY_DIM, 1, 1, GROUP, RAW)
    latent_query = load_query(query_row + KEY_DIM, heads, KEY_DIM + VALUE_DIM, VALUE_DIM, 4, 1, GROUP, RAW)
    lane = tl.arange(0, STEP)
    weight_sums = tl.zeros((STEP, heads.shape[0]), tl.float32)
    for start in range(first, last, STEP):
        token = start + lane
        slot = window_slots(tl.minimum(token, count - 1), place, slots, sink_slots)
        rows = load_rows(keys + slot * KEY_DIM, KEY_DIM, padded(KEY_DIM))
        products = tl.dot(convert(rows, RAW), query[0], input_precision="ieee")
        quarters = raw_quarters(latents + slot * VALUE_DIM, VALUE_DIM, RAW)
        products = add_products(products, quarters, latent_query, 0, 4)
        peak, weight_sums, decay, weights, _ = softmax_step(
            peak, weight_sums, products, token < count, logit_scale, cap
        )
        acc = add_latents(acc, quarters, weights.to(RAW), decay, 0, 4)
    return peak, join_totals(old_peak, total, peak, weight_sums), acc


@triton.jit(
    do_not_specialize=[
        *("page_table", "high_count", "low_count", "window_start", "length", "valid", "sink_end"),
        *("table_width", "kv_heads", "slots", "sink_slots", "splits"),
    ]
)
def latent_kernel(
    query, pages, page_table, high_count, low_count, window_key, window_value, window_start, length, valid,
    sink_end, partial_output, partial_peak, partial_total, logit_scale, cap,
    table_width, kv_heads, slots, sink_slots, splits,
    HIGH: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr, ONE_TIER: tl.constexpr,
):  # fmt: skip
    """Attends from HEADS query heads to one split of one row. Grid: (rows, cdiv(GROUP, HEADS), splits).

    Pages have no scores. Arguments are as in `attend_kernel`, except:

    Args:
        query: absorbed queries, [rows, GROUP, key_dim + value_dim].
    """
    row = tl.program_id(0)
    split = tl.program_id(2)
    KEY_DIM: tl.constexpr = HIGH.key_dim
    VALUE_DIM: tl.constexpr = HIGH.value_dim
    ELEMENT: tl.constexpr = query.dtype.element_ty
    high, low, window, place = row_counts(
        high_count, low_count, window_start, length, valid, sink_end, row, row // kv_heads, slots, sink_slots
    )
    high_blocks, paged_blocks, first, last = blocks_of(high, low, window, split, splits, MIN_BLOCKS, BLOCK)

    wide_row = row.to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    query_row = query + wide_row * (GROUP * (KEY_DIM + VALUE_DIM))
    table = page_table + wide_row * table_width
    state = no_tokens(HEADS, VALUE_DIM)
    state = attend_tier(
        state, query_row, heads, pages, table, tl.minimum(first, high_blocks), tl.minimum(last, high_blocks), high,
        logit_scale, cap, 1, HIGH, GROUP, BLOCK, ELEMENT, OPERAND, RAW, MODE,
    )  # fmt: skip
    if not ONE_TIER:
        state = attend_tier(
            state, query_row, heads, pages, table + table_width - 1, tl.maximum(first - high_blocks, 0),
            tl.minimum(last, paged_blocks) - high_blocks, low, logit_scale, cap, -1, LOW, GROUP, BLOCK, ELEMENT,
            OPERAND, RAW, MODE,
        )  # fmt: skip
    state = attend_window(
        state, query_row, heads, window_key + wide_row * slots * KEY_DIM, window_value + wide_row * slots * VALUE_DIM,
        tl.maximum(first - paged_blocks, 0) * BLOCK, tl.minimum((last - paged_blocks) * BLOCK, window), window, place,
        slots, sink_slots, logit_scale, cap, KEY_DIM, VALUE_DIM, GROUP, RAW,
    )  # fmt: skip
    store_split(
        state, partial_output, partial_peak, partial_total, wide_row * splits + split, heads, first < last, GROUP,
        VALUE_DIM,
    )  # fmt: skip
