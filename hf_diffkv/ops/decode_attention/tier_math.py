"""Triton helpers for products of queries with stored keys and of weights with stored values, block by block.

Tokens are the long side of every product; the query heads of a group, padded to HEADS, are the short side.
Accumulators are a tuple of four quarters of the value row, [padded(QUARTER), HEADS] each. The planes of packed 2-bit
codes are quarters, those of 4-bit codes are pairs of quarters, and codes of several fields are unpacked by quarters, so
no element ever changes lanes.

A `TIER` is a `TierLayout` as a compile-time constant. ELEMENT is the model's dtype, RAW the dtype in which its rows are
multiplied, and OPERAND the dtype in which codes are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dequant import (
    BIASED,
    EXACT,
    SUBNORMAL,
    code_bias,
    code_unit,
    fields,
    gather_codes,
    load_codes,
    load_lanes,
    load_runs,
    pieces,
    stack_pieces,
    unpack,
)
from ..narrow_kernel import load_metadata, load_words, metadata_of

# rows are evicted first, so that logits and partial outputs stay in the cache for the next kernel
READ_ONCE = tl.constexpr("evict_first")


@triton.constexpr_function
def padded(dim):
    """Returns the padded size of one dimension of a matrix product."""
    return max(16, triton.next_power_of_2(dim))


@triton.constexpr_function
def quarter(dim):
    return -(-dim // 4)


@triton.constexpr_function
def quarter_count(dim, part):
    """Returns the number of elements in a quarter; the last quarters have fewer if `dim` is not a multiple of 4."""
    return min(quarter(dim), max(dim - part * quarter(dim), 0))


@triton.constexpr_function
def planar_keys(tier):
    """Returns whether each piece of unpacked keys lies within one quantisation group."""
    return tier.k_bits < 16 and pieces(tier.k_bits) % tier.k_groups == 0


@triton.constexpr_function
def planar_values(tier):
    """Returns whether each quarter of a value row is a piece (or half or a quarter of one) within one group."""
    return 1 < tier.v_bits < 16 and tier.value_dim % 4 == 0 and 4 % tier.v_groups == 0


@triton.constexpr_function
def tile_pieces(tier, mode):
    """Returns the number of key pieces that are multiplied at once, side by side and each padded.

    In PTX mode, these are all pieces of a group: since four threads share 32 elements of a row, no element changes
    threads.
    """
    joined = planar_keys(tier) and mode == 1 and padded(tier.key_dim // pieces(tier.k_bits)) >= 32
    return pieces(tier.k_bits) // tier.k_groups if joined else 1


@triton.constexpr_function
def key_tiles(tier, mode):
    """Returns the number of tiles of a key and of the query, each of `tile_pieces` pieces or of one group."""
    if tier.k_bits == 16:
        return 1
    return pieces(tier.k_bits) // tile_pieces(tier, mode) if planar_keys(tier) else tier.k_groups


@triton.constexpr_function
def power_of_two_in(number):
    """Returns the largest power of two that divides a number."""
    return number & -number


@triton.jit
def page_offset(page, BYTES: tl.constexpr, MODE: tl.constexpr):
    """Returns the byte offset of pages of BYTES bytes, int64.

    In PTX mode, the product is opaque to Triton. Otherwise Triton 3.6 would recompute the addresses in the layout of
    every tile that is loaded from them, which costs a seventh more instructions.
    """
    if MODE == 0:
        return page.to(tl.int64) * BYTES
    else:
        offset = tl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [page, BYTES], dtype=tl.int64, is_pure=True, pack=1
        )
        return tl.multiple_of(offset, power_of_two_in(BYTES))


@triton.jit
def load_rows(pointer, COUNT: tl.constexpr, LANES: tl.constexpr):
    """Loads rows [tokens, LANES] of COUNT elements from pointers [tokens]; unmasked if full, so that loads are wide."""
    lane = tl.arange(0, LANES)
    return load_lanes(pointer, lane, lane < COUNT, COUNT == LANES, READ_ONCE)


@triton.jit
def load_pieces(rows, COUNT: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, FORM: tl.constexpr,
                HERE: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Loads codes of packed rows (pointers [tokens]) of DIM elements as pieces [tokens, padded(COUNT)]."""
    LANES: tl.constexpr = padded(COUNT)
    lane = tl.arange(0, LANES)
    return load_codes(rows, lane, lane < COUNT, COUNT == LANES, BITS, DIM, FORM, HERE, MODE, DTYPE, READ_ONCE)


@triton.jit
def convert(x, DTYPE: tl.constexpr):
    """Converts `x` to DTYPE through float32, because the interpreter holds bf16 as integers."""
    if x.dtype == DTYPE:
        return x
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def load_query(row, heads, STRIDE: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr,
               GROUP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Loads DIM elements of the group's query heads, STRIDE elements apart, in TILES tiles of PIECES pieces.

    Returns a tuple of [PIECES * padded(PIECE), HEADS], where pieces have PIECE elements. Tiles of several pieces are
    loaded 32 elements at a time, as four threads of a matrix product hold them, so that they stay in registers.
    """
    PIECE: tl.constexpr = DIM // (TILES * PIECES)
    LANES: tl.constexpr = padded(PIECE)
    STEP: tl.constexpr = 32 if PIECES > 1 else LANES
    tiles = ()
    for tile in tl.static_range(TILES):
        parts = ()
        for part in tl.static_range(PIECES * LANES // STEP):
            row_lane = part * STEP + tl.arange(0, STEP)
            lane = row_lane % LANES
            element = row_lane // LANES * PIECE + lane
            mask = (heads < GROUP)[:, None] & (lane < PIECE)[None, :]
            pointer = row + heads[:, None] * STRIDE + tile * (DIM // TILES) + element[None, :]
            parts = parts + (convert(tl.load(pointer, mask=mask, other=0.0), DTYPE),)
        tiles = tiles + (tl.trans(stack_pieces(parts, 0, PIECES * LANES // STEP)),)
    return tiles


@triton.jit
def query_sums(query, TIER: tl.constexpr, MODE: tl.constexpr):
    """Returns, for each key group, the query's sum and the contribution of the codes' bias, [HEADS] each."""
    sums = ()
    biases = ()
    if TIER.k_bits < 16:
        GROUPS: tl.constexpr = TIER.k_groups
        TILES: tl.constexpr = key_tiles(TIER, MODE) // GROUPS
        PIECES: tl.constexpr = tile_pieces(TIER, MODE)
        LANES: tl.constexpr = query[0].shape[0] // PIECES
        piece = tl.arange(0, PIECES * LANES) // LANES
        for group in tl.static_range(GROUPS):
            total = tl.zeros((query[0].shape[1],), tl.float32)
            bias = tl.zeros((query[0].shape[1],), tl.float32)
            for tile in tl.static_range(group * TILES, group * TILES + TILES):
                rows = query[tile].to(tl.float32)
                total += tl.sum(rows, 0)
                if planar_keys(TIER):
                    code_biases = tl.zeros((PIECES * LANES,), tl.float32)
                    for index in tl.static_range(PIECES):
                        value = code_bias(TIER.k_bits, tile * PIECES + index, MODE)
                        code_biases = tl.where(piece == index, value, code_biases)
                    bias += tl.sum(rows * code_biases[:, None], 0)
            sums = sums + (total,)
            biases = biases + (bias,)
    return sums, biases


@triton.constexpr_function
def narrow_words(tier):
    """Returns whether `tier_words` have two bytes; asynchronous copies need at least four."""
    return 2 in (tier.key_metadata, tier.value_metadata)


@triton.jit
def tier_words(base, slot, mask, TIER: tl.constexpr):
    """Loads the stored metadata of the tokens in `slot` of the pages at `base`, for keys and for values.

    Each is a tuple of [tokens], one for each group. It is empty at 16 bits, and for values whose metadata
    `add_tier_values` reads for each element.
    """
    key_words = ()
    value_words = ()
    KEY: tl.constexpr = TIER.key_metadata
    VALUE: tl.constexpr = TIER.value_metadata
    KEY_GROUPS: tl.constexpr = TIER.k_groups
    VALUE_GROUPS: tl.constexpr = TIER.v_groups
    if TIER.k_bits < 16:
        metadata = base + TIER.key_metadata_offset + slot * (KEY * KEY_GROUPS)
        for group in tl.static_range(KEY_GROUPS):
            key_words = key_words + (load_words(metadata + KEY * group, mask, KEY),)
    if planar_values(TIER):
        metadata = base + TIER.value_metadata_offset + slot * (VALUE * VALUE_GROUPS)
        for group in tl.static_range(VALUE_GROUPS):
            value_words = value_words + (load_words(metadata + VALUE * group, mask, VALUE),)
    return key_words, value_words


@triton.jit
def tier_products(base, slot, words, query, sums, biases, TIER: tl.constexpr, ELEMENT: tl.constexpr,
                  OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Returns query . key of the tokens in `slot` of the pages at `base`, float32 [tokens, HEADS].

    `words` is the keys' metadata.
    """
    keys = base + TIER.key_offset + slot * TIER.key_row
    if TIER.k_bits == 16:
        rows = load_rows(keys.to(tl.pointer_type(ELEMENT)), TIER.key_dim, padded(TIER.key_dim))
        products = tl.dot(convert(rows, RAW), query[0], input_precision="ieee")
    else:
        GROUPS: tl.constexpr = TIER.k_groups
        PLANAR: tl.constexpr = planar_keys(TIER)
        TILES: tl.constexpr = key_tiles(TIER, MODE) // GROUPS
        PIECES: tl.constexpr = tile_pieces(TIER, MODE)
        DIM: tl.constexpr = TIER.key_dim // GROUPS
        if PLANAR:
            PIECE: tl.constexpr = DIM // (TILES * PIECES)
            codes = load_pieces(keys, PIECE, TIER.k_bits, TIER.key_dim, BIASED, False, MODE, OPERAND)
        for group in tl.static_range(GROUPS):
            if PLANAR:
                # subtracting the bias first is free, because a matrix product has an accumulator anyway
                raw = tl.zeros((slot.shape[0], sums[group].shape[0]), tl.float32) - biases[group][None, :]
                for tile in tl.static_range(group * TILES, group * TILES + TILES):
                    code = stack_pieces(codes, tile * PIECES, PIECES)
                    raw = tl.dot(code, query[tile], raw, input_precision="ieee")
            else:
                lane = tl.arange(0, padded(DIM))
                element = (group * DIM + lane)[None, :]
                code = gather_codes(keys[:, None], element, (lane < DIM)[None, :], TIER.k_bits, TIER.key_dim)
                raw = tl.dot(code.to(OPERAND), query[group], input_precision="ieee")
            scale, zero = metadata_of(words[group], TIER.key_metadata, TIER.k_bits)
            term = raw * scale[:, None] + zero[:, None] * sums[group][None, :]
            if group == 0:
                products = term
            else:
                products += term
    return products


@triton.jit
def add_raw_values(acc, rows, weights, decay, DIM: tl.constexpr, RAW: tl.constexpr):
    """Returns acc * decay + values^T weights for rows (pointers [tokens]) in the model's dtype."""
    weights = weights.to(RAW)
    QUARTER: tl.constexpr = quarter(DIM)
    out = ()
    for part in tl.static_range(4):
        values = convert(load_rows(rows + part * QUARTER, quarter_count(DIM, part), padded(QUARTER)), RAW)
        out = out + (tl.dot(tl.trans(values), weights, acc[part] * decay[None, :], input_precision="ieee"),)
    return out


@triton.jit
def value_quarters(rows, TIER: tl.constexpr, HERE: tl.constexpr, OPERAND: tl.constexpr, MODE: tl.constexpr):
    """Loads codes of the rows (pointers [tokens]) as four quarters [tokens, padded(QUARTER)].

    With HERE (see `unpack`), codes are exact; otherwise subnormal, since exact codes of several fields would spill.
    """
    DIM: tl.constexpr = TIER.value_dim
    QUARTER: tl.constexpr = DIM // 4
    BITS: tl.constexpr = TIER.v_bits
    COUNT: tl.constexpr = pieces(BITS)
    FORM: tl.constexpr = EXACT if HERE else SUBNORMAL
    if COUNT == 4:
        return load_pieces(rows, QUARTER, BITS, DIM, FORM, HERE, MODE, OPERAND)
    else:
        LANES: tl.constexpr = padded(QUARTER)
        lane = tl.arange(0, LANES)
        runs = load_runs(rows, 4 // COUNT, QUARTER, lane, lane < QUARTER, QUARTER == LANES, READ_ONCE)
        codes = ()
        for run in tl.static_range(4 // COUNT):
            codes = codes + unpack((runs[run],), BITS, FORM, HERE, MODE, OPERAND)
        if COUNT == 2:
            return (codes[0], codes[2], codes[1], codes[3])
        else:
            return codes


@triton.constexpr_function
def run_length(tier, mode):
    """Returns the number of consecutive elements that a thread takes from a token's quarter; 1 keeps their order.

    In a matrix product, a thread has every eighth row of values^T. If these rows are taken from a quarter in runs, each
    thread unpacks the values that it multiplies, four bytes or more at once. In the original order, other threads would
    unpack them and pass them through shared memory as fp16.
    """
    run = padded(quarter(tier.value_dim)) // 8
    worth = run >= 4 or len(fields(tier.v_bits)) == 1
    return run if mode == 1 and planar_values(tier) and worth else 1


@triton.jit
def swap_rows(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Reorders rows of [FIRST * SECOND, columns] from (first, second) to (second, first) order."""
    return x.reshape(FIRST, SECOND, x.shape[1]).permute(1, 0, 2).reshape(FIRST * SECOND, x.shape[1])


@triton.constexpr_function
def weight_gain(tier):
    """Returns the power of two that scales weights before they multiply value codes; 1 for other values.

    It lifts small products of weight and scale into fp16's range. Large ones still fit: a weight is at most 1, and a
    scale at most 2 * 65504 / levels.
    """
    return 2.0 ** (tier.v_bits - 2) if planar_values(tier) else 1.0


@triton.constexpr_function
def value_unit(tier, part, mode):
    """Returns the factor of a quarter's products of weights and values."""
    unit = code_unit(tier.v_bits, part * pieces(tier.v_bits) // 4, mode) if run_length(tier, mode) > 1 else 1.0
    return unit * weight_gain(tier)


@triton.jit
def as_multiplied(acc, TIER: tl.constexpr, MODE: tl.constexpr):
    """Converts the output's quarters to the units and row order in which values are multiplied."""
    RUN: tl.constexpr = run_length(TIER, MODE)
    out = ()
    for part in tl.static_range(4):
        rows = acc[part] * value_unit(TIER, part, MODE)
        out = out + (swap_rows(rows, 8, RUN) if RUN > 1 else rows,)
    return out


@triton.jit
def in_order(acc, TIER: tl.constexpr, MODE: tl.constexpr):
    """Inverts `as_multiplied`."""
    RUN: tl.constexpr = run_length(TIER, MODE)
    out = ()
    for part in tl.static_range(4):
        rows = swap_rows(acc[part], RUN, 8) if RUN > 1 else acc[part]
        out = out + (rows * (1.0 / value_unit(TIER, part, MODE)),)
    return out


@triton.constexpr_function
def zero_groups(tier):
    """Returns the number of value groups whose zero points are summed separately from the codes."""
    return tier.v_groups if planar_values(tier) else 0


@triton.jit
def no_zeros(TIER: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """Returns empty sums of weight * zero point, not yet reduced over tokens: [BLOCK, HEADS] for each zero group."""
    zeros = ()
    for _ in tl.static_range(zero_groups(TIER)):
        zeros = zeros + (tl.zeros((BLOCK, HEADS), tl.float32),)
    return zeros


@triton.jit
def add_zeros(acc, zeros, TIER: tl.constexpr):
    """Adds the zero points' contribution to the output's quarters."""
    GROUPS: tl.constexpr = zero_groups(TIER)
    if GROUPS > 0:
        out = ()
        for part in tl.static_range(4):
            out = out + (acc[part] + tl.sum(zeros[part * GROUPS // 4], 0)[None, :],)
        acc = out
    return acc


@triton.jit
def scaled_weights(weights, scale, TIER: tl.constexpr, OPERAND: tl.constexpr):
    """Returns weights [tokens, HEADS] times scale [tokens] and `weight_gain`, as OPERAND.

    A token that fp16 rounds to zero would lose its codes but keep its zero point, and thousands of such tokens add up.
    Offsets below half of fp16's smallest number round some neighbouring tokens up and others down, which preserves
    their sum. Weights of 0 stay 0.
    """
    scaled = weights * (scale * weight_gain(TIER))[:, None]
    if OPERAND == tl.float16:
        # in a matrix product, a thread has every eighth token, so its offset takes one register
        place = tl.arange(0, weights.shape[0]) % 8
        scaled += ((place.to(tl.float32) - 3.5) * 2.0**-27)[:, None]
    return scaled.to(OPERAND)


@triton.jit
def add_tier_values(acc, zeros, base, slot, words, weights, decay, TIER: tl.constexpr, ELEMENT: tl.constexpr,
                    OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Returns acc * decay + values^T weights over the tokens in `slot` of the pages at `base`, and the new `zeros`.

    Args:
        acc: output's quarters, `as_multiplied`.
        zeros: accumulators from `no_zeros`; the zero points of tiers with `zero_groups` are added there.
        words: metadata of the values, see `tier_words`.
        weights: [tokens, HEADS].
    """
    DIM: tl.constexpr = TIER.value_dim
    GROUPS: tl.constexpr = TIER.v_groups
    rows = base + TIER.value_offset + slot * TIER.value_row
    if TIER.v_bits == 16:
        acc = add_raw_values(acc, rows.to(tl.pointer_type(ELEMENT)), weights, decay, DIM, RAW)
    elif planar_values(TIER):
        quarters = value_quarters(rows, TIER, run_length(TIER, MODE) == 1, OPERAND, MODE)
        SHARED: tl.constexpr = 4 // GROUPS
        RUN: tl.constexpr = run_length(TIER, MODE)
        out = ()
        zeros_out = ()
        for group in tl.static_range(GROUPS):
            scale, zero = metadata_of(words[group], TIER.value_metadata, TIER.v_bits)
            zeros_out = zeros_out + (zeros[group] * decay[None, :] + weights * zero[:, None],)
            scaled = scaled_weights(weights, scale, TIER, OPERAND)
            for part in tl.static_range(group * SHARED, group * SHARED + SHARED):
                before = acc[part] * decay[None, :]
                values = tl.trans(quarters[part])
                if RUN > 1:
                    values = swap_rows(values, 8, RUN)
                out = out + (tl.dot(values, scaled, before, input_precision="ieee"),)
        acc = out
        zeros = zeros_out
    else:
        QUARTER: tl.constexpr = quarter(DIM)
        SIZE: tl.constexpr = TIER.value_metadata
        metadata = base + TIER.value_metadata_offset + slot * (SIZE * GROUPS)
        lane = tl.arange(0, padded(QUARTER))
        out = ()
        for part in tl.static_range(4):
            element = tl.minimum(part * QUARTER + lane, DIM - 1)
            code = gather_codes(rows[:, None], element[None, :], None, TIER.v_bits, DIM)
            group = element // (DIM // GROUPS)
            scale, zero = load_metadata(metadata[:, None] + SIZE * group[None, :], SIZE, TIER.v_bits)
            values = (code.to(tl.float32) * scale + zero).to(OPERAND)
            before = acc[part] * decay[None, :]
            out = out + (tl.dot(tl.trans(values), weights.to(OPERAND), before, input_precision="ieee"),)
        acc = out
    return acc, zeros
