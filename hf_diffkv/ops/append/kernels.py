"""Appending in one launch (Triton): a token's row is copied as it is, and looked at on the way."""

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
):  # fmt: skip
    """One row (request, head) per program; `length` is counted up by a later launch, as all heads read it.

    Args:
        window_key, window_value [rows, slots, dim]; window_score float32 [rows, slots]; length int64 [batch];
        invalid uint8 [1]; key, value [batch, heads, dim] with the strides given; valid uint8 [batch] or None;
        sink_end int64 [batch] or None.
    """
    row = tl.program_id(0)
    batch = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    real = batch >= 0
    if valid is not None:
        real = tl.load(valid + batch) != 0
    position = tl.load(length + batch)
    slot = sink_slots + position % (slots - sink_slots)
    if sink_end is not None:
        slot = tl.where(position < tl.load(sink_end + batch), position, slot)
    slot += row.to(tl.int64) * slots
    key_lane = tl.arange(0, KEY_WIDTH)
    value_lane = tl.arange(0, VALUE_WIDTH)
    key_there = key_lane < tl.where(real, KEY_DIM, 0)
    value_there = value_lane < tl.where(real, VALUE_DIM, 0)
    keys = tl.load(key + batch * key_batch + head * key_head + key_lane, mask=key_there, other=0.0)
    values = tl.load(value + batch * value_batch + head * value_head + value_lane, mask=value_there, other=0.0)
    tl.store(window_key + slot * KEY_DIM + key_lane, keys, mask=key_there)
    tl.store(window_value + slot * VALUE_DIM + value_lane, values, mask=value_there)
    tl.store(window_score + slot, 0.0, mask=real)
    # a comparison with NaN is false
    good = tl.sum((tl.abs(keys.to(tl.float32)) <= limit).to(tl.int32), 0)
    good += tl.sum((tl.abs(values.to(tl.float32)) <= limit).to(tl.int32), 0)
    tl.store(invalid, 1, mask=good < KEY_WIDTH + VALUE_WIDTH)
