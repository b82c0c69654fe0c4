"""Triton kernels that fix the offsets of rows whose first token leaves the window; see `row_kernels.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .row_kernels import LENGTHS, new_start, token_in_slot


@triton.jit(do_not_specialize=["rank", "heads", "tokens", "parts", "key_batch", "key_head", "key_token"])
def sum_keys_kernel(key, rank, sums, heads, tokens, parts, key_batch, key_head, key_token, DIM: tl.constexpr,
                    LANES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Sums the model's keys over STEPS blocks of tokens into float32 [rows, parts, DIM]. Grid: (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    request, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    lane = tl.arange(0, LANES)
    total = tl.zeros((BLOCK, LANES), tl.float32)
    for step in range(STEPS):
        token = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        real = token < tokens
        if rank is not None:
            real = real & (tl.load(rank + request * tokens + token, mask=real, other=-1) >= 0)
        rows = key + request * key_batch + head * key_head + token.to(tl.int64) * key_token
        mask = real[:, None] & (lane < DIM)[None, :]
        total += tl.load(rows[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(sums + (row.to(tl.int64) * parts + part) * DIM + lane, tl.sum(total, 0), mask=lane < DIM)


@triton.jit(do_not_specialize=[*LENGTHS, "count", "heads", "tokens", "window", "slots", "sink_slots", "parts"])
def fix_offsets_kernel(
    sums, matrix, window_key, offset, shift, count, length, window_start, sink_end, heads, tokens, window, slots,
    sink_slots, parts, DIM: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Sets the offset of rows whose first token leaves the window to the mean of all their keys. Grid: (rows,).

    Args:
        sums: sums of the new keys, as `sum_keys_kernel` writes them.
        matrix: rotation, float32 [DIM, DIM], or None.
        offset: float32 [rows, DIM], updated in place.
        shift: output, change of the offset, float32 [rows, DIM].
    """
    row = tl.program_id(0)
    request = row // heads
    lane = tl.arange(0, LANES)
    column = lane < DIM
    base = row.to(tl.int64) * DIM
    total = tl.zeros((LANES,), tl.float32)
    for first in tl.static_range(0, DIM, INNER):
        inner = first + tl.arange(0, INNER)
        some = tl.zeros((INNER,), tl.float32)
        part = 0
        while part < parts:
            some += tl.load(sums + base * parts + part * DIM + inner, mask=inner < DIM, other=0.0)
            part += 1
        if matrix is None:
            total += tl.sum(tl.where(inner[:, None] == lane[None, :], some[:, None], 0.0), 0)
        else:
            weights = tl.load(
                matrix + inner[:, None] * DIM + lane[None, :], mask=(inner < DIM)[:, None] & column[None, :], other=0.0
            )
            total += tl.sum(some[:, None] * weights, 0)
    held, before, sinks = tl.load(length + request), tl.load(window_start + request), tl.load(sink_end + request)
    slot = 0
    while slot < slots:
        several = slot + tl.arange(0, INNER)
        _, there = token_in_slot(several, before, held, sinks, sink_slots, slots)
        keys = window_key + (row.to(tl.int64) * slots + several)[:, None] * DIM + lane[None, :]
        total += tl.sum(tl.load(keys, mask=there[:, None] & column[None, :], other=0.0).to(tl.float32), 0)
        slot += INNER
    start, end = new_start(count, length, window_start, request, True, tokens, window)
    old = tl.load(offset + base + lane, mask=column, other=0.0)
    total += held.to(tl.float32) * old
    mean = tl.div_rn(total, tl.zeros_like(total) + tl.maximum(end, 1).to(tl.float32))
    due = (before == sinks) & (end - before > window)
    fixed = tl.where(due, mean, old)
    tl.store(offset + base + lane, fixed, mask=column)
    tl.store(shift + base + lane, fixed - old, mask=column)
