"""Triton kernels that quantise tokens into pages, read them back and copy them (DiffKV, section 4).

A tile of tokens is [tokens, planes, bytes]: element (t, p, j) is dimension p * dim / planes + j of token t. Byte j of
the packed row is then the sum of its planes' shifted codes, and nothing is shuffled between planes and bytes. At 8 and
16 bits there is one plane. Codes of several fields use the planes of the narrowest field; a plane of a wider field is
several of these in sequence. `WIDTH` is the number of bytes of a plane (elements at 16 bits), padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dequant import below, fields, gather_codes
from ..narrow_kernel import metadata_of, narrow_metadata, scale_and_zero, store_positions, store_scores


@triton.constexpr_function
def tile_planes(bits):
    """Returns the number of planes of a tile, that is, of the narrowest field."""
    return max(1, 8 // fields(bits)[-1])


@triton.constexpr_function
def padded_width(dim, bits):
    """Returns the bytes of a plane of a tile (elements at 16 bits), padded to a power of two."""
    return triton.next_power_of_2(dim // tile_planes(bits))


@triton.jit
def round_even(x):
    """Rounds half to even for |x| < 2^22; larger values stay beyond every code range, with their sign."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def stored_bits(x, DTYPE: tl.constexpr):
    """Returns the bits of float32 `x` rounded to the model's dtype, ties to even."""
    if DTYPE == tl.bfloat16:
        # in integers, because the interpreter truncates this cast; exact for values that came from bfloat16
        bits = x.to(tl.uint32, bitcast=True)
        out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
    elif DTYPE == tl.float16:
        out = x.to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        out = x.to(tl.uint32, bitcast=True)
    return out


@triton.jit
def tile_dims(DIM: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the dimension of each element of a tile, [1, planes, WIDTH], and whether it exists."""
    PLANES: tl.constexpr = tile_planes(BITS)
    BYTES: tl.constexpr = DIM // PLANES
    byte = tl.arange(0, WIDTH)[None, None, :]
    dim = tl.arange(0, PLANES)[None, :, None] * BYTES + byte
    return dim, (byte < BYTES) & (dim < DIM)


@triton.jit
def tier_dims(TIER: tl.constexpr, IS_KEY: tl.constexpr):
    """Returns `tile_dims` of the tier's keys or values."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
    return tile_dims(DIM, BITS, padded_width(DIM, BITS))


@triton.jit
def read_input(rows, row, active, dim, exists, stride):
    """Loads elements `dim` of the given rows of a [n, dim] tensor with row stride `stride`, as float32."""
    return tl.load(
        rows + row.to(tl.int64)[:, None, None] * stride + dim, mask=active[:, None, None] & exists, other=0.0
    ).to(tl.float32)


@triton.jit
def write_tile(x, codes, metadata, active, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr, chosen=None):
    """Quantises a float32 tile of keys or values (`tier_dims`) into the rows at `codes` and `metadata` (`rows_at`).

    `chosen` is a tile of codes to write, or None for the nearest ones.

    scale = (max - min) / (2^bits - 1) and zero = min are rounded to fp16, or as in `pages/segments.py` if a group's
    metadata has 2 bytes. Codes are computed with the rounded pair. Values are inset if the tier says so
    (`pages/inset.py`).
    """
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
    GROUPS: tl.constexpr = TIER.k_groups if IS_KEY else TIER.v_groups
    METADATA: tl.constexpr = TIER.key_metadata if IS_KEY else TIER.value_metadata
    WIDTH: tl.constexpr = padded_width(DIM, BITS)
    LEVELS: tl.constexpr = 2**BITS - 1
    GROUP_DIM: tl.constexpr = DIM // GROUPS
    dim, exists = tile_dims(DIM, BITS, WIDTH)
    if BITS == 16:
        element = tl.arange(0, WIDTH)[None, :]
        bits = tl.reshape(stored_bits(x, DTYPE), (x.shape[0], WIDTH))
        pointer = codes.to(tl.pointer_type(bits.dtype))[:, None] + element
        tl.store(pointer, bits, mask=active[:, None] & (element < DIM))
    else:
        if not IS_KEY and TIER.value_shrinkage != 1:
            x = tl.div_rn(x, tl.zeros_like(x) + TIER.value_shrinkage)
        # a scale of 0 stores code 0: dividing by 1 gives a finite number, which the last `where` discards
        tile = tl.zeros_like(x).to(tl.int32)
        for group in tl.static_range(GROUPS):
            member = exists
            if GROUPS > 1:
                member = exists & (dim // GROUP_DIM == group)
            low = tl.min(tl.min(tl.where(member, x, float("inf")), 2), 1)
            high = tl.max(tl.max(tl.where(member, x, float("-inf")), 2), 1)
            if not IS_KEY and TIER.value_parts > 0:
                inwards = tl.div_rn(high - low, tl.zeros_like(low) + TIER.value_parts)
                low, high = low + inwards, high - inwards
            if METADATA == 2:
                word = narrow_metadata(low, high, BITS)
                step, zero_point = scale_and_zero(word, BITS)
                step = step[:, None, None]
            else:
                scale = tl.div_rn(high - low, tl.zeros_like(low) + LEVELS).to(tl.float16)
                zero = low.to(tl.float16)
                step = scale.to(tl.float32)[:, None, None]
                zero_point = zero.to(tl.float32)
            divisor = tl.where(step == 0.0, 1.0, step)
            shifted = x - zero_point[:, None, None]
            code = round_even(tl.div_rn(shifted, tl.zeros_like(x) + divisor))
            code = tl.minimum(tl.maximum(code, 0.0), LEVELS)
            code = tl.where(step == 0.0, 0.0, code).to(tl.int32)
            if chosen is not None:
                code = chosen.to(tl.int32)
            tile += tl.where(member, code, 0)
            if METADATA == 4:
                word = scale.to(tl.uint16, bitcast=True).to(tl.uint32)
                word |= zero.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            tl.store(metadata.to(tl.pointer_type(word.dtype)) + group, word, mask=active)
        write_field(tile, codes, active, DIM, fields(BITS)[0], WIDTH)
        for index in tl.static_range(1, len(fields(BITS))):
            field = codes + DIM * below(BITS, index) // 8
            write_field(tile >> below(BITS, index), field, active, DIM, fields(BITS)[index], WIDTH)


@triton.jit
def write_field(code, codes, active, DIM: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Packs the lowest BITS bits of a tile of codes, int32 [tokens, planes, WIDTH], into the rows at `codes`.

    The tile's planes may be finer than the field's; a plane of the field is then PARTS of them in sequence.
    """
    PLANES: tl.constexpr = 8 // BITS
    PARTS: tl.constexpr = code.shape[1] // PLANES
    BYTES: tl.constexpr = DIM // code.shape[1]
    tokens: tl.constexpr = code.shape[0]
    parts = tl.reshape(code & ((1 << BITS) - 1), (tokens, PLANES, PARTS, WIDTH))
    if PLANES > 1:
        packed = tl.sum(parts << (tl.arange(0, PLANES)[None, :, None, None] * BITS), 1)
    else:
        packed = tl.reshape(parts, (tokens, PARTS, WIDTH))
    byte = tl.arange(0, WIDTH)[None, None, :]
    place = tl.arange(0, PARTS)[None, :, None] * BYTES + byte
    tl.store(codes[:, None, None] + place, packed.to(tl.uint8), mask=active[:, None, None] & (byte < BYTES))


@triton.jit
def read_tile(codes, metadata, active, dim, exists, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantises elements `dim` ([1, a, b]) of the keys or values at `codes` and `metadata` (pointers [tokens]).

    The result is float32. code * scale is exact in float32 (8 and 11 significant bits), and so are narrow zero points,
    so fusing the addition changes nothing.
    """
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
    GROUPS: tl.constexpr = TIER.k_groups if IS_KEY else TIER.v_groups
    METADATA: tl.constexpr = TIER.key_metadata if IS_KEY else TIER.value_metadata
    mask = active[:, None, None] & exists
    if BITS == 16:
        x = tl.load(codes.to(tl.pointer_type(DTYPE))[:, None, None] + dim, mask=mask, other=0.0).to(tl.float32)
    else:
        code = gather_codes(codes[:, None, None], dim, mask, BITS, DIM)
        pointer = metadata.to(tl.pointer_type(tl.uint16 if METADATA == 2 else tl.uint32))[:, None, None]
        if GROUPS == 1:
            word = tl.load(pointer, mask=active[:, None, None], other=0)
        else:
            word = tl.load(pointer + dim // (DIM // GROUPS), mask=mask, other=0)
        scale, zero = metadata_of(word, METADATA, BITS)
        x = code.to(tl.float32) * scale + zero
    return x


@triton.jit
def rows_at(base, slot, TIER: tl.constexpr, IS_KEY: tl.constexpr):
    """Returns pointers to the codes and the metadata of the keys or values in slots of the pages at `base`."""
    if IS_KEY:
        codes = base + TIER.key_offset + slot * TIER.key_row
        metadata = base + TIER.key_metadata_offset + slot * (TIER.key_metadata * TIER.k_groups)
    else:
        codes = base + TIER.value_offset + slot * TIER.value_row
        metadata = base + TIER.value_metadata_offset + slot * (TIER.value_metadata * TIER.v_groups)
    return codes, metadata


@triton.jit
def write_scalars(base, slot, score, position, active, TIER: tl.constexpr):
    """Writes the score (float32) and position (int32) of each token to the page at `base`."""
    store_scores(base + TIER.score_offset, slot, score, active, TIER.score_bytes)
    store_positions(base + TIER.position_offset, slot, position, active, TIER.position_bytes)


@triton.jit(do_not_specialize=["count"])
def store_tokens_kernel(
    pages, page, slot, key, value, score, position, count, key_stride, value_stride,
    TIER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantises BLOCK tokens into their slots; tokens of the null page (0) are skipped. Grid: (cdiv(count, BLOCK),).

    No two tokens share a byte, so there are no read-modify-writes and no races.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(page + token, mask=token < count, other=0).to(tl.int64)
    active = number != 0
    place = tl.load(slot + token, mask=active, other=0).to(tl.int32)
    base = pages + number * TIER.page_bytes

    dim, exists = tier_dims(TIER, True)
    x = read_input(key, token, active, dim, exists, key_stride)
    codes, metadata = rows_at(base, place, TIER, True)
    write_tile(x, codes, metadata, active, TIER, True, DTYPE)
    dim, exists = tier_dims(TIER, False)
    x = read_input(value, token, active, dim, exists, value_stride)
    codes, metadata = rows_at(base, place, TIER, False)
    write_tile(x, codes, metadata, active, TIER, False, DTYPE)
    if TIER.score_bytes > 0:
        own_score = tl.load(score + token, mask=active, other=0.0)
        own_position = tl.load(position + token, mask=active, other=0)
        write_scalars(base, place, own_score, own_position, active, TIER)


@triton.jit(do_not_specialize=["count"])
def load_tokens_kernel(
    pages, page, slot, key, value, count, TIER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Dequantises BLOCK tokens into key and value, contiguous float32 [count, dim]; the null page yields zeros.

    Grid: (cdiv(count, BLOCK),).
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(page + token, mask=token < count, other=0).to(tl.int64)
    active = number != 0
    place = tl.load(slot + token, mask=active, other=0).to(tl.int32)
    base = pages + number * TIER.page_bytes
    row = token.to(tl.int64)[:, None, None]
    inside = (token < count)[:, None, None]

    dim, exists = tier_dims(TIER, True)
    codes, metadata = rows_at(base, place, TIER, True)
    x = read_tile(codes, metadata, active, dim, exists, TIER, True, DTYPE)
    tl.store(key + row * TIER.key_dim + dim, x, mask=inside & exists)
    dim, exists = tier_dims(TIER, False)
    codes, metadata = rows_at(base, place, TIER, False)
    x = read_tile(codes, metadata, active, dim, exists, TIER, False, DTYPE)
    tl.store(value + row * TIER.value_dim + dim, x, mask=inside & exists)


@triton.constexpr_function
def copied_word(row_bytes):
    """Returns the widest integer type whose size divides `row_bytes`."""
    return tl.uint32 if row_bytes % 4 == 0 else tl.uint16 if row_bytes % 2 == 0 else tl.uint8


@triton.constexpr_function
def copied_words(row_bytes):
    return row_bytes // (4 if row_bytes % 4 == 0 else 2 if row_bytes % 2 == 0 else 1)


@triton.constexpr_function
def copied_lanes(row_bytes):
    return triton.next_power_of_2(copied_words(row_bytes))


@triton.jit
def copy_rows(source, target, from_slot, to_slot, active, OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Copies rows of one segment between pages (pointers [tokens]); segments start at multiples of 16 bytes."""
    COUNT: tl.constexpr = copied_words(ROW_BYTES)
    lane = tl.arange(0, copied_lanes(ROW_BYTES))[None, :]
    mask = active[:, None] & (lane < COUNT)
    source = (source + OFFSET).to(tl.pointer_type(copied_word(ROW_BYTES)))
    target = (target + OFFSET).to(tl.pointer_type(copied_word(ROW_BYTES)))
    row = tl.load(source[:, None] + (from_slot[:, None] * COUNT + lane), mask=mask)
    tl.store(target[:, None] + (to_slot[:, None] * COUNT + lane), row, mask=mask)


@triton.jit
def copy_tile(source, target, from_slot, to_slot, active, TIER: tl.constexpr):
    """Copies tokens between slots of pages (pointers [tokens]) with their metadata, scores and positions."""
    copy_rows(source, target, from_slot, to_slot, active, TIER.key_offset, TIER.key_row)
    copy_rows(source, target, from_slot, to_slot, active, TIER.value_offset, TIER.value_row)
    if TIER.k_bits < 16:
        BYTES: tl.constexpr = TIER.key_metadata * TIER.k_groups
        copy_rows(source, target, from_slot, to_slot, active, TIER.key_metadata_offset, BYTES)
    if TIER.v_bits < 16:
        SIZE: tl.constexpr = TIER.value_metadata * TIER.v_groups
        copy_rows(source, target, from_slot, to_slot, active, TIER.value_metadata_offset, SIZE)
    if TIER.score_bytes > 0:
        copy_rows(source, target, from_slot, to_slot, active, TIER.score_offset, TIER.score_bytes)
        copy_rows(source, target, from_slot, to_slot, active, TIER.position_offset, TIER.position_bytes)


@triton.jit(do_not_specialize=["count"])
def copy_tokens_kernel(
    pages, from_page, from_slot, to_page, to_slot, count, TIER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copies BLOCK stored tokens without requantising them. Grid: (cdiv(count, BLOCK),)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    active = token < count
    source = pages + tl.load(from_page + token, mask=active, other=0).to(tl.int64) * TIER.page_bytes
    target = pages + tl.load(to_page + token, mask=active, other=0).to(tl.int64) * TIER.page_bytes
    old = tl.load(from_slot + token, mask=active, other=0).to(tl.int32)
    new = tl.load(to_slot + token, mask=active, other=0).to(tl.int32)
    copy_tile(source, target, old, new, active, TIER)
