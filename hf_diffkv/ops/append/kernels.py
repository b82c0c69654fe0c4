"""Appending in one launch (Triton): a token's rows are copied, rotated where the store holds them so, and looked at on
the way."""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize.kernels import stored_bits
from ..rotation_kernel import rotated_tile, rounded


@triton.jit
def copy_heads(rows, to, exists, matrix, offset, limit, ROOT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
               INNER: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Writes heads of a token as they are held; how many elements of the tile are within the limit.

    Args:
        rows, to: pointers [heads]. matrix: contiguous, or None, which copies heads as they are.
        offset: float32 pointers [heads] to what is taken off, or None; nothing is taken off what is not rotated.
    """
    lane = tl.arange(0, WIDTH)[None, :]
    there = exists[:, None] & (lane < DIM)
    if matrix is None:
        x = tl.load(rows[:, None] + lane, mask=there, other=0.0)
        tl.store(to[:, None] + lane, x, mask=there)
        held = x.to(tl.float32)
    else:
        DTYPE: tl.constexpr = to.dtype.element_ty
        tile, _ = rotated_tile(rows, exists, matrix, DIM, 1, ROOT, DIM, 16, WIDTH, INNER, OPERAND)
        x = tl.reshape(tile, (rows.shape[0], WIDTH))
        if offset is not None:
            x -= tl.load(offset[:, None] + lane, mask=there, other=0.0)
        bits = stored_bits(x, DTYPE)
        tl.store(to.to(tl.pointer_type(bits.dtype))[:, None] + lane, bits, mask=there)
        held = rounded(x, DTYPE)
    # a comparison with NaN is false
    return tl.sum(tl.sum((tl.abs(held) <= limit).to(tl.int32), 1), 0)


# Triton would compile anew for sizes, and for addresses of single layers, that happen to be multiples of 16
@triton.jit(
    do_not_specialize=[
        *("window_score", "length", "invalid", "valid", "sink_end", "offset", "slots", "sink_slots", "heads"),
        *("query_heads", "key_batch", "key_head", "value_batch", "value_head", "query_batch", "query_head"),
    ]
)
def append_kernel(
    window_key, window_value, window_score, length, invalid, key, value, valid, sink_end, query, held_query,
    key_matrix, value_matrix, offset, limit, slots, sink_slots, heads, query_heads,
    key_batch, key_head, value_batch, value_head, query_batch, query_head,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_ROOT: tl.constexpr, VALUE_ROOT: tl.constexpr, INNER: tl.constexpr, OPERAND: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The first program of a request appends all its KV heads, HEADS at a time, so that it can count up `length` when
    all have read it; each of the others rotates HEADS query heads. Grid (batch, 1), or (batch, 1 + query programs).

    Args:
        window_key, window_value [rows, slots, dim]; window_score float32 [rows, slots]; length int64 [batch];
        invalid uint8 [1]; key, value [batch, heads, dim] and query [batch, query_heads, KEY_DIM] or None, with the
        strides given; valid uint8 [batch] or None; sink_end int64 [batch] or None.
        held_query: [batch, query_heads, KEY_DIM], contiguous. key_matrix, value_matrix: both, or both None.
        offset: float32 [rows, KEY_DIM] or None.
    """
    batch = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, HEADS)
    if part == 0:
        real = batch >= 0
        if valid is not None:
            real = tl.load(valid + batch) != 0
        position = tl.load(length + batch)
        slot = sink_slots + position % (slots - sink_slots)
        if sink_end is not None:
            slot = tl.where(position < tl.load(sink_end + batch), position, slot)
        for first in range(0, tl.where(real, heads, 0), HEADS):
            head = (first + lane).to(tl.int64)
            exists = head < heads
            row = batch * heads + head
            place = row * slots + slot
            row_offset = offset
            if offset is not None:
                row_offset = offset + row * KEY_DIM
            good = copy_heads(
                key + batch * key_batch + head * key_head, window_key + place * KEY_DIM, exists, key_matrix,
                row_offset, limit, KEY_ROOT, KEY_DIM, KEY_WIDTH, INNER, OPERAND,
            )  # fmt: skip
            good += copy_heads(
                value + batch * value_batch + head * value_head, window_value + place * VALUE_DIM, exists,
                value_matrix, None, limit, VALUE_ROOT, VALUE_DIM, VALUE_WIDTH, INNER, OPERAND,
            )  # fmt: skip
            tl.store(window_score + place, tl.zeros((HEADS,), tl.float32), mask=exists)
            tl.store(invalid, 1, mask=good < HEADS * (KEY_WIDTH + VALUE_WIDTH))
        # all threads have read what is about to change
        tl.debug_barrier()
        tl.store(length + batch, position + 1, mask=real)
    elif query is not None:
        head = ((part - 1) * HEADS + lane).to(tl.int64)
        copy_heads(
            query + batch * query_batch + head * query_head, held_query + (batch * query_heads + head) * KEY_DIM,
            head < query_heads, key_matrix, None, limit, KEY_ROOT, KEY_DIM, KEY_WIDTH, INNER, OPERAND,
        )  # fmt: skip
