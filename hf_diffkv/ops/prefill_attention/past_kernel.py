"""Triton kernel for attention from new tokens to stored ones, which it reads from their pages and the window.

A program processes BLOCK_M rows, each a new token and a query head of the same KV head, over one split of the stored
tokens. It writes its softmax state to memory, where `flash_forward` picks it up. Conventions are as in kernels.py.

Tiles of stored keys or values are dequantised in registers. The pieces of unpacked rows (`ops/dequant.py`) are
concatenated in a tile, each padded, so nothing is shuffled. To give every tile the same order of columns regardless of
its bits, rows are cut into PARTS equal parts, as many as the level with the most pieces has. Each part is padded to
WIDTH / PARTS columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode_attention.rows import row_counts, window_slots
from ..dequant import EXACT, load_codes, load_lanes, pieces, stack_pieces
from ..narrow_kernel import load_metadata
from ..quantize.kernels import rows_at
from .kernels import as_operand, load_extent, online_softmax


@triton.jit
def row_columns(DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Returns which element of a row of DIM each of WIDTH columns holds, and whether it holds one."""
    column = tl.arange(0, WIDTH)
    if DIM == WIDTH:
        return column, column < DIM
    else:
        lane = column % (WIDTH // PARTS)
        return column // (WIDTH // PARTS) * (DIM // PARTS) + lane, lane < DIM // PARTS


@triton.jit
def load_columns(pointer, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Loads rows of DIM elements at pointers [tokens] as a tile [tokens, WIDTH], with zeros in unused columns."""
    element, exists = row_columns(DIM, WIDTH, PARTS)
    return load_lanes(pointer, element, exists, DIM == WIDTH, "")


@triton.jit
def decode(codes, scale, zero, DOT: tl.constexpr, MODE: tl.constexpr):
    """Returns codes * scale + zero, rounded once."""
    if MODE == 0:
        return (codes * scale + zero).to(DOT)
    else:
        scale, zero = scale.to(tl.float16), zero.to(tl.float16)
        return as_operand(tl.fma(codes, tl.broadcast_to(scale, codes.shape), tl.broadcast_to(zero, codes.shape)), DOT)


@triton.jit
def stored_tile(rows, metadata, SIZE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
                WIDTH: tl.constexpr, PARTS: tl.constexpr, ELEMENT: tl.constexpr, DOT: tl.constexpr,
                MODE: tl.constexpr):  # fmt: skip
    """Loads keys or values of stored tokens, dequantised to DOT, [tokens, WIDTH].

    Args:
        rows, metadata: uint8 pointers [tokens].
        SIZE: bytes of a group's metadata.
        ELEMENT: dtype of 16-bit rows.
        MODE: method of unpacking, see `ops/dequant.py`.
    """
    if BITS == 16:
        return as_operand(load_columns(rows.to(tl.pointer_type(ELEMENT)), DIM, WIDTH, PARTS), DOT)
    else:
        PIECES: tl.constexpr = pieces(BITS)
        PIECE: tl.constexpr = DIM // PIECES
        lane, exists = row_columns(PIECE, WIDTH // PIECES, PARTS // PIECES)
        codes = load_codes(rows, lane, exists, PIECE == WIDTH // PIECES, BITS, DIM, EXACT, True, MODE, tl.float32, "")
        tiles = ()
        if PIECES % GROUPS == 0:
            for group in tl.static_range(GROUPS):
                scale, zero = load_metadata(metadata + SIZE * group, SIZE, BITS)
                for piece in tl.static_range(group * PIECES // GROUPS, (group + 1) * PIECES // GROUPS):
                    tiles = tiles + (decode(codes[piece], scale[:, None], zero[:, None], DOT, MODE),)
        else:
            for piece in tl.static_range(PIECES):
                group = tl.where(exists, (piece * PIECE + lane) // (DIM // GROUPS), 0)
                scale, zero = load_metadata(metadata[:, None] + SIZE * group[None, :], SIZE, BITS)
                tiles = tiles + (decode(codes[piece], scale, zero, DOT, MODE),)
        return stack_pieces(tiles, 0, PIECES)


@triton.jit
def page_rows(pages, table, token, DIRECTION: tl.constexpr, TIER: tl.constexpr):
    """Returns page pointers [tokens] and slots of a row's tokens; `table` points to the level's first entry."""
    page = tl.load(table + DIRECTION * (token // TIER.capacity))
    return page_base(pages, page, TIER), token % TIER.capacity


@triton.jit
def page_base(pages, page, TIER: tl.constexpr):
    return pages + page.to(tl.int64) * TIER.page_bytes


@triton.jit
def tier_tile(base, slot, TIER: tl.constexpr, IS_KEY: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
              ELEMENT: tl.constexpr, DOT: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Loads the `stored_tile` of keys or values in slots of the pages at `base`."""
    SIZE: tl.constexpr = TIER.key_metadata if IS_KEY else TIER.value_metadata
    BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
    GROUPS: tl.constexpr = TIER.k_groups if IS_KEY else TIER.v_groups
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    rows, metadata = rows_at(base, slot, TIER, IS_KEY)
    return stored_tile(rows, metadata, SIZE, BITS, GROUPS, DIM, WIDTH, PARTS, ELEMENT, DOT, MODE)


@triton.jit
def attend_pages(
    state, q, pages, table, first, last, count, scale, cap,
    DIRECTION: tl.constexpr, TIER: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ELEMENT: tl.constexpr,
    DOT: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Attends to blocks [first, last) of a level of `count` tokens.

    Tokens past the end repeat the last one and are masked.
    """
    acc, peak, total = state
    lane = tl.arange(0, BLOCK_N)
    # loaded one block ahead, because Triton prefetches rows only if it already knows their page
    begin = tl.minimum(first * BLOCK_N + lane, tl.maximum(count - 1, 0))
    page = tl.load(table + DIRECTION * (begin // TIER.capacity))
    for block in range(first, last):
        token = block * BLOCK_N + lane
        slot = tl.minimum(token, count - 1) % TIER.capacity
        following = tl.minimum(token + BLOCK_N, count - 1)
        next_page = tl.load(table + DIRECTION * (following // TIER.capacity))
        base = page_base(pages, page, TIER)
        k = tier_tile(base, slot, TIER, True, KEY_WIDTH, KEY_PARTS, ELEMENT, DOT, MODE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        peak, total, shrink, p = online_softmax(peak, total, s, (token < count)[None, :], scale, cap)
        v = tier_tile(base, slot, TIER, False, VALUE_WIDTH, VALUE_PARTS, ELEMENT, DOT, MODE)
        acc = tl.dot(p.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
        page = next_page
    return acc, peak, total


@triton.jit
def attend_window(
    state, q, keys, values, first, last, count, place, slots, sink_slots, scale, cap,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attends to blocks [first, last) of a window of `count` tokens."""
    acc, peak, total = state
    for block in range(first, last):
        token = block * BLOCK_N + tl.arange(0, BLOCK_N)
        slot = window_slots(tl.minimum(token, count - 1), place, slots, sink_slots).to(tl.int64)
        k = as_operand(load_columns(keys + slot * KEY_DIM, KEY_DIM, KEY_WIDTH, KEY_PARTS), DOT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        peak, total, shrink, p = online_softmax(peak, total, s, (token < count)[None, :], scale, cap)
        v = as_operand(load_columns(values + slot * VALUE_DIM, VALUE_DIM, VALUE_WIDTH, VALUE_PARTS), DOT)
        acc = tl.dot(p.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(
    do_not_specialize=[
        *("table", "high_count", "low_count", "window_start", "past_length", "sink_end"),
        *("width", "slots", "sink_slots", "length", "group", "kv_heads"),
    ]
)
def past_forward(
    query, pages, table, high_count, low_count, window_key, window_value, window_start, past_length, sink_end,
    extents, partial_output, partial_peak, partial_total, scale, cap,
    width, slots, sink_slots, length, group, kv_heads, query_batch, query_head, query_token,
    HIGH: tl.constexpr, LOW: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Computes the softmax state of BLOCK_M rows over one split. Grid: (row blocks, splits, batch * kv_heads).

    Row r is query head r % group of the KV head's group at new token r // group. Blocks of nothing but padding write
    nothing. `pages` to `window_start` and `sink_end` are as in decode attention's `attend_kernel`.

    Args:
        query: [batch, query_heads, length, key_dim], with the given strides.
        past_length: tokens seen before, int64 [batch].
        extents: `row_extents` of the queries, or None.
        partial_output: float32 [splits, batch * kv_heads, length * group, value_dim].
        partial_peak, partial_total: float32 [splits, batch * kv_heads, length * group]; the peak of a split without
            tokens is -inf, and its output is not written.
    """
    split = tl.program_id(1)
    kv_row = tl.program_id(2)
    batch = kv_row // kv_heads
    kv_head = kv_row % kv_heads
    start = tl.program_id(0) * BLOCK_M
    first_real, end_real, _, _, _ = load_extent(extents, batch, length)
    if (start >= end_real * group) | (start + BLOCK_M <= first_real * group):
        return
    KEY_DIM: tl.constexpr = HIGH.key_dim
    VALUE_DIM: tl.constexpr = HIGH.value_dim
    ELEMENT: tl.constexpr = window_key.dtype.element_ty
    high, low, window, place = row_counts(
        high_count, low_count, window_start, past_length, None, sink_end, kv_row, batch, slots, sink_slots
    )
    high_blocks = tl.cdiv(high, BLOCK_N)
    paged_blocks = high_blocks + tl.cdiv(low, BLOCK_N)
    blocks = paged_blocks + tl.cdiv(window, BLOCK_N)
    share = tl.cdiv(blocks, tl.num_programs(1))
    first = split * share
    last = tl.minimum(first + share, blocks)

    row = start + tl.arange(0, BLOCK_M)
    i = row // group
    head = kv_head * group + row % group
    exists = row < length * group
    wide = batch.to(tl.int64)
    dim, real_dim = row_columns(KEY_DIM, KEY_WIDTH, KEY_PARTS)
    query_rows = query + wide * query_batch + head.to(tl.int64) * query_head + i.to(tl.int64) * query_token
    q = tl.load(query_rows[:, None] + dim[None, :], mask=exists[:, None] & real_dim[None, :], other=0.0)
    q = as_operand(q, DOT)
    state = (
        tl.zeros((BLOCK_M, VALUE_WIDTH), tl.float32),
        tl.full((BLOCK_M,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    table += kv_row.to(tl.int64) * width
    state = attend_pages(
        state, q, pages, table, tl.minimum(first, high_blocks), tl.minimum(last, high_blocks), high, scale, cap,
        1, HIGH, KEY_WIDTH, VALUE_WIDTH, KEY_PARTS, VALUE_PARTS, BLOCK_N, ELEMENT, DOT, MODE,
    )  # fmt: skip
    state = attend_pages(
        state, q, pages, table + width - 1, tl.maximum(first - high_blocks, 0),
        tl.minimum(last, paged_blocks) - high_blocks, low, scale, cap,
        -1, LOW, KEY_WIDTH, VALUE_WIDTH, KEY_PARTS, VALUE_PARTS, BLOCK_N, ELEMENT, DOT, MODE,
    )  # fmt: skip
    wide_row = kv_row.to(tl.int64) * slots
    acc, peak, total = attend_window(
        state, q, window_key + wide_row * KEY_DIM, window_value + wide_row * VALUE_DIM,
        tl.maximum(first - paged_blocks, 0), last - paged_blocks, window, place, slots, sink_slots, scale, cap,
        KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, KEY_PARTS, VALUE_PARTS, BLOCK_N, DOT,
    )  # fmt: skip

    done = (split.to(tl.int64) * tl.num_programs(2) + kv_row) * (length * group) + start
    lane = tl.arange(0, BLOCK_M)
    tl.store(partial_peak + done + lane, peak, mask=exists)
    tl.store(partial_total + done + lane, total, mask=exists)
    dim, real_dim = row_columns(VALUE_DIM, VALUE_WIDTH, VALUE_PARTS)
    worked = lane < tl.where(first < last, length * group - start, 0)
    out = partial_output + done * VALUE_DIM + (lane[:, None] * VALUE_DIM + dim[None, :])
    tl.store(out, acc, mask=worked[:, None] & real_dim[None, :])
