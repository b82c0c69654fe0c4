"""Triton kernel that appends a token in one launch: it copies, optionally rotates, and checks keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize.kernels import stored_bits
from ..rotation_kernel import rotated_tile, rounded


@triton.jit
def copy_heads(rows, to, exists, matrix, offset, limit, ROOT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
               INNER: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Writes heads of a token in the store's form; returns the number of the tile's elements within the limit.

    Args:
        rows, to: pointers to the source and target rows, [heads].
        exists: True for heads to write, bool [heads].
        matrix: contiguous rotation, or None, which copies heads unchanged.
        offset: pointers to the offset to subtract, float32 [heads], or None; ignored without a rotation.
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
    # NaN fails the comparison
    return tl.sum(tl.sum((tl.abs(held) <= limit).to(tl.int32), 1), 0)


# without this, Triton would recompile for sizes, and for addresses of single layers, that are multiples of 16
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
    """Appends one token per request and rotates its query.

    The first program of a request appends all its KV heads, HEADS at a time, so that it can increment `length` after
    all have read it. Each of the other programs rotates HEADS query heads. Grid: (batch, 1 + query programs).

    Args:
        window_key, window_value: [rows, slots, dim].
        window_score: float32 [rows, slots].
        length: int64 [batch].
        invalid: uint8 [1].
        key, value: [batch, heads, dim], with the given strides.
        valid: uint8 [batch] or None.
        sink_end: int64 [batch] or None.
        query: [batch, query_heads, KEY_DIM], with the given strides, or None.
        held_query: rotated query, contiguous [batch, query_heads, KEY_DIM].
        key_matrix, value_matrix: rotations; both or neither.
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
        # all threads have read `length`, which changes now
        tl.debug_barrier()
        tl.store(length + batch, position + 1, mask=real)
    elif query is not None:
        head = ((part - 1) * HEADS + lane).to(tl.int64)
        copy_heads(
            query + batch * query_batch + head * query_head, held_query + (batch * query_heads + head) * KEY_DIM,
            head < query_heads, key_matrix, None, limit, KEY_ROOT, KEY_DIM, KEY_WIDTH, INNER, OPERAND,
        )  # fmt: skip
