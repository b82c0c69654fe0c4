"""Appending in one launch (Triton): a token's rows are copied as they are, and looked at on the way."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton would compile anew for sizes, and for addresses of single layers, that happen to be multiples of 16
@triton.jit(
    do_not_specialize=[
        *("window_score", "length", "invalid", "valid", "sink_end", "slots", "sink_slots", "heads"),
        *("key_batch", "key_head", "value_batch", "value_head"),
    ]
)
def append_kernel(
    window_key, window_value, window_score, length, invalid, key, value, valid, sink_end, limit, slots, sink_slots,
    heads, key_batch, key_head, value_batch, value_head,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One request per program, HEADS heads at a time, so that it can count up `length` when all heads have read it.

    Args:
        window_key, window_value [rows, slots, dim]; window_score float32 [rows, slots]; length int64 [batch];
        invalid uint8 [1]; key, value [batch, heads, dim] with the strides given; valid uint8 [batch] or None;
        sink_end int64 [batch] or None.
    """
    batch = tl.program_id(0).to(tl.int64)
    real = batch >= 0
    if valid is not None:
        real = tl.load(valid + batch) != 0
    position = tl.load(length + batch)
    slot = sink_slots + position % (slots - sink_slots)
    if sink_end is not None:
        slot = tl.where(position < tl.load(sink_end + batch), position, slot)
    key_lane = tl.arange(0, KEY_WIDTH)[None, :]
    value_lane = tl.arange(0, VALUE_WIDTH)[None, :]
    for first in range(0, tl.where(real, heads, 0), HEADS):
        head = (first + tl.arange(0, HEADS)).to(tl.int64)
        exists = head < heads
        place = (batch * heads + head) * slots + slot
        key_there = exists[:, None] & (key_lane < KEY_DIM)
        value_there = exists[:, None] & (value_lane < VALUE_DIM)
        head_key = key + batch * key_batch + head * key_head
        head_value = value + batch * value_batch + head * value_head
        keys = tl.load(head_key[:, None] + key_lane, mask=key_there, other=0.0)
        values = tl.load(head_value[:, None] + value_lane, mask=value_there, other=0.0)
        tl.store(window_key + place[:, None] * KEY_DIM + key_lane, keys, mask=key_there)
        tl.store(window_value + place[:, None] * VALUE_DIM + value_lane, values, mask=value_there)
        tl.store(window_score + place, tl.zeros((HEADS,), tl.float32), mask=exists)
        # a comparison with NaN is false
        good = tl.sum(tl.sum((tl.abs(keys.to(tl.float32)) <= limit).to(tl.int32), 1), 0)
        good += tl.sum(tl.sum((tl.abs(values.to(tl.float32)) <= limit).to(tl.int32), 1), 0)
        tl.store(invalid, 1, mask=good < HEADS * (KEY_WIDTH + VALUE_WIDTH))
    # all threads have read what is about to change
    tl.debug_barrier()
    tl.store(length + batch, position + 1, mask=real)
