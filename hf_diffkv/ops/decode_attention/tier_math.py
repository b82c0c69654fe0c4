"""Products of queries with stored keys and of weights with stored values, block by block (Triton helpers).

Tokens stand on the long side of every product and the query heads of a group, padded to HEADS, on the short one.
Accumulators are a tuple of four quarters of the value row, [padded(QUARTER), HEADS] each: the planes of packed 2-bit
codes are quarters and those of 4-bit codes pairs of them, so no element ever changes lanes.

A `TIER` is a `TierLayout` as a compile-time constant. ELEMENT is the model's dtype, RAW the one its rows are multiplied
in, OPERAND the one of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dequant import code_bias, extract, load_metadata, unpack


@triton.constexpr_function
def padded(dim):
    """Lanes for one dimension of a matrix product."""
    return max(16, triton.next_power_of_2(dim))


@triton.constexpr_function
def quarter(dim):
    return -(-dim // 4)


@triton.constexpr_function
def quarter_count(dim, part):
    """Elements in a quarter; fewer in the last ones where `dim` is not a multiple of 4."""
    return min(quarter(dim), max(dim - part * quarter(dim), 0))


@triton.constexpr_function
def planar_keys(tier):
    """Whether each plane of packed keys lies within one quantisation group."""
    return tier.k_bits < 16 and (8 // tier.k_bits) % tier.k_groups == 0


@triton.constexpr_function
def planar_values(tier):
    """Whether each quarter of a value row is a plane (or half, or quarter of one) and lies within one group."""
    return tier.v_bits in (2, 4, 8) and tier.value_dim % 4 == 0 and 4 % tier.v_groups == 0


@triton.constexpr_function
def query_parts(tier):
    """Pieces the query is multiplied in: planes of the packed keys, or groups."""
    if tier.k_bits == 16:
        return 1
    return 8 // tier.k_bits if planar_keys(tier) else tier.k_groups


@triton.constexpr_function
def power_of_two_in(number):
    """The largest power of two that divides a number."""
    return number & -number


@triton.jit
def page_offset(page, BYTES: tl.constexpr, MODE: tl.constexpr):
    """Where pages of BYTES bytes begin, int64.

    In PTX mode the product is opaque to Triton: 3.6 would otherwise compute the addresses of a tile once more in the
    layout of every tile that is loaded from them, which costs a seventh more instructions.
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
    """Rows [tokens, LANES] of COUNT elements from pointers [tokens]; full rows without a mask, for wide loads."""
    lane = tl.arange(0, LANES)
    if COUNT == LANES:
        return tl.load(pointer[:, None] + lane[None, :])
    else:
        return tl.load(pointer[:, None] + lane[None, :], mask=(lane < COUNT)[None, :], other=0)


@triton.jit
def convert(x, DTYPE: tl.constexpr):
    """To DTYPE; by way of float32, since the interpreter holds bf16 as integers."""
    if x.dtype == DTYPE:
        return x
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def load_query(row, heads, DIM: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """The group's query heads in PARTS pieces along the dimension: a tuple of [padded(DIM / PARTS), HEADS]."""
    PART: tl.constexpr = DIM // PARTS
    lane = tl.arange(0, padded(PART))
    mask = (lane < PART)[:, None] & (heads < GROUP)[None, :]
    parts = ()
    for part in tl.static_range(PARTS):
        pointer = row + heads[None, :] * DIM + part * PART + lane[:, None]
        parts = parts + (convert(tl.load(pointer, mask=mask, other=0.0), DTYPE),)
    return parts


@triton.jit
def query_sums(query, TIER: tl.constexpr, MODE: tl.constexpr):
    """Per key group, [HEADS]: the query's sum, and what the bias of the unpacked codes adds to the product."""
    sums = ()
    biases = ()
    if TIER.k_bits < 16:
        GROUPS: tl.constexpr = TIER.k_groups
        PARTS: tl.constexpr = query_parts(TIER) // GROUPS
        for group in tl.static_range(GROUPS):
            total = tl.sum(query[group * PARTS].to(tl.float32), 0)
            bias = total * code_bias(TIER.k_bits, group * PARTS, MODE)
            for part in tl.static_range(group * PARTS + 1, group * PARTS + PARTS):
                part_total = tl.sum(query[part].to(tl.float32), 0)
                total += part_total
                bias += part_total * code_bias(TIER.k_bits, part, MODE)
            sums = sums + (total,)
            biases = biases + (bias,)
    return sums, biases


@triton.jit
def tier_products(base, slot, query, sums, biases, TIER: tl.constexpr, ELEMENT: tl.constexpr, OPERAND: tl.constexpr,
                  RAW: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """query . key of the tokens in `slot` of the pages at `base`: float32 [tokens, HEADS]."""
    keys = base + TIER.key_offset + slot * TIER.key_row
    if TIER.k_bits == 16:
        rows = load_rows(keys.to(tl.pointer_type(ELEMENT)), TIER.key_dim, padded(TIER.key_dim))
        products = tl.dot(convert(rows, RAW), query[0], input_precision="ieee")
    else:
        GROUPS: tl.constexpr = TIER.k_groups
        PLANAR: tl.constexpr = planar_keys(TIER)
        PARTS: tl.constexpr = query_parts(TIER) // GROUPS
        DIM: tl.constexpr = TIER.key_dim // GROUPS
        metadata = base + TIER.key_metadata_offset + slot * (4 * GROUPS)
        if PLANAR:
            codes = unpack(load_rows(keys, TIER.key_row, padded(TIER.key_row)), TIER.k_bits, False, MODE, OPERAND)
        for group in tl.static_range(GROUPS):
            if PLANAR:
                # taking the bias off first costs nothing: a matrix product adds to something anyway
                raw = tl.zeros((slot.shape[0], sums[group].shape[0]), tl.float32) - biases[group][None, :]
                for part in tl.static_range(group * PARTS, group * PARTS + PARTS):
                    raw = tl.dot(codes[part], query[part], raw, input_precision="ieee")
            else:
                lane = tl.arange(0, padded(DIM))
                element = group * DIM + lane
                pointer = keys[:, None] + (element % TIER.key_row)[None, :]
                packed = tl.load(pointer, mask=(lane < DIM)[None, :], other=0)
                code = extract(packed, (element // TIER.key_row * TIER.k_bits)[None, :], TIER.k_bits, OPERAND)
                raw = tl.dot(code, query[group], input_precision="ieee")
            scale, zero = load_metadata(metadata + 4 * group)
            term = raw * scale[:, None] + zero[:, None] * sums[group][None, :]
            if group == 0:
                products = term
            else:
                products += term
    return products


@triton.jit
def add_raw_values(acc, rows, weights, decay, DIM: tl.constexpr, RAW: tl.constexpr):
    """acc * decay + values^T weights for rows (pointers [tokens]) in the model's dtype."""
    weights = weights.to(RAW)
    QUARTER: tl.constexpr = quarter(DIM)
    out = ()
    for part in tl.static_range(4):
        values = convert(load_rows(rows + part * QUARTER, quarter_count(DIM, part), padded(QUARTER)), RAW)
        out = out + (tl.dot(tl.trans(values), weights, acc[part] * decay[None, :], input_precision="ieee"),)
    return out


@triton.jit
def value_quarters(rows, TIER: tl.constexpr, OPERAND: tl.constexpr, MODE: tl.constexpr):
    """Codes of the rows (pointers [tokens]) as four quarters [tokens, padded(QUARTER)]."""
    QUARTER: tl.constexpr = TIER.value_dim // 4
    LANES: tl.constexpr = padded(QUARTER)
    BITS: tl.constexpr = TIER.v_bits
    first = unpack(load_rows(rows, QUARTER, LANES), BITS, True, MODE, OPERAND)
    if BITS == 2:
        return first
    second = unpack(load_rows(rows + QUARTER, QUARTER, LANES), BITS, True, MODE, OPERAND)
    if BITS == 4:
        return (first[0], second[0], first[1], second[1])
    else:
        third = unpack(load_rows(rows + 2 * QUARTER, QUARTER, LANES), BITS, True, MODE, OPERAND)
        fourth = unpack(load_rows(rows + 3 * QUARTER, QUARTER, LANES), BITS, True, MODE, OPERAND)
        return (first[0], second[0], third[0], fourth[0])


@triton.constexpr_function
def zero_groups(tier):
    """Value groups whose zero points are summed apart from the codes."""
    return tier.v_groups if planar_values(tier) else 0


@triton.jit
def no_zeros(TIER: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """Per such group, sum of weight * zero point, not yet added up over tokens: a tuple of [BLOCK, HEADS]."""
    zeros = ()
    for _ in tl.static_range(zero_groups(TIER)):
        zeros = zeros + (tl.zeros((BLOCK, HEADS), tl.float32),)
    return zeros


@triton.jit
def add_zeros(acc, zeros, TIER: tl.constexpr):
    """Adds the zero points' share to the output's quarters."""
    GROUPS: tl.constexpr = zero_groups(TIER)
    if GROUPS > 0:
        out = ()
        for part in tl.static_range(4):
            out = out + (acc[part] + tl.sum(zeros[part * GROUPS // 4], 0)[None, :],)
        acc = out
    return acc


@triton.jit
def add_tier_values(acc, zeros, base, slot, weights, decay, TIER: tl.constexpr, ELEMENT: tl.constexpr,
                    OPERAND: tl.constexpr, RAW: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """acc * decay + values^T weights over the tokens in `slot` of the pages at `base`; weights [tokens, HEADS].

    Values of the tiers with `zero_groups` are taken without their zero point, which goes to `zeros`.
    """
    DIM: tl.constexpr = TIER.value_dim
    GROUPS: tl.constexpr = TIER.v_groups
    rows = base + TIER.value_offset + slot * TIER.value_row
    metadata = base + TIER.value_metadata_offset + slot * (4 * GROUPS)
    if TIER.v_bits == 16:
        acc = add_raw_values(acc, rows.to(tl.pointer_type(ELEMENT)), weights, decay, DIM, RAW)
    elif planar_values(TIER):
        quarters = value_quarters(rows, TIER, OPERAND, MODE)
        SHARED: tl.constexpr = 4 // GROUPS
        out = ()
        zeros_out = ()
        for group in tl.static_range(GROUPS):
            scale, zero = load_metadata(metadata + 4 * group)
            zeros_out = zeros_out + (zeros[group] * decay[None, :] + weights * zero[:, None],)
            scaled = (weights * scale[:, None]).to(OPERAND)
            for part in tl.static_range(group * SHARED, group * SHARED + SHARED):
                before = acc[part] * decay[None, :]
                out = out + (tl.dot(tl.trans(quarters[part]), scaled, before, input_precision="ieee"),)
        acc = out
        zeros = zeros_out
    else:
        QUARTER: tl.constexpr = quarter(DIM)
        lane = tl.arange(0, padded(QUARTER))
        out = ()
        for part in tl.static_range(4):
            element = tl.minimum(part * QUARTER + lane, DIM - 1)
            packed = tl.load(rows[:, None] + (element % TIER.value_row)[None, :])
            code = extract(packed, (element // TIER.value_row * TIER.v_bits)[None, :], TIER.v_bits, tl.float32)
            group = element // (DIM // GROUPS)
            scale, zero = load_metadata(metadata[:, None] + 4 * group[None, :])
            values = (code * scale + zero).to(OPERAND)
            before = acc[part] * decay[None, :]
            out = out + (tl.dot(tl.trans(values), weights.to(OPERAND), before, input_precision="ieee"),)
        acc = out
    return acc, zeros
