"""Triton kernels for the attention that each key receives from a prompt's queries (DiffKV, section 3).

The probabilities are recomputed from the log-sum-exp that `flash_forward` kept, one key block at a time, and summed
over later queries, so no N x N matrix exists. `column_scores` handles dense keys. `past_scores` handles stored keys
and dequantises each block once. Conventions are as in kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode_attention.rows import row_counts, window_slots
from .kernels import as_operand, load_extent, load_rows, soft_cap
from .past_kernel import load_columns, page_rows, row_columns, tier_tile


@triton.jit
def receive(
    k, j, query, lse, query_stride, start, stop, allowed, allowed_stride, scale, cap,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, DOT: tl.constexpr, CHECK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns the sum [N] of the probabilities that queries [start, stop) of one head give keys `k` [N, KEY_WIDTH].

    Args:
        j: positions of the keys.
        query, lse: pointers to the first element of the head's rows.
        allowed: mask, as in `attend`.
        PARTS: order of the keys' columns, see past_kernel.py.
        CHECK: False if every query is real and, with CAUSAL, later than every key.
    """
    sums = tl.zeros_like(j).to(tl.float32)
    dim, real_dim = row_columns(KEY_DIM, KEY_WIDTH, PARTS)
    for step in tl.range((stop - start + BLOCK_M - 1) // BLOCK_M, num_stages=1 if CHECK and allowed is None else None):
        at = start + step * BLOCK_M
        i = at + tl.arange(0, BLOCK_M)
        there = i < stop
        spot = query + at.to(tl.int64) * query_stride + (tl.arange(0, BLOCK_M)[:, None] * query_stride + dim[None, :])
        q = as_operand(tl.load(spot, mask=there[:, None] & real_dim[None, :], other=0.0), DOT)
        denominator = tl.load(lse + i, mask=there, other=float("inf"))
        # keys are the rows, so that their sums stay within a thread
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        if cap is not None:
            s = soft_cap(s, cap)
        p = tl.math.exp2(s - denominator[None, :])
        if CHECK:
            # padding may hold NaN, which an infinite denominator does not mask
            keep = (denominator < float("inf"))[None, :]
            if CAUSAL:
                keep = keep & (i[None, :] > j[:, None])
            if allowed is not None:
                spot = allowed + i.to(tl.int64)[None, :] * allowed_stride + j[:, None]
                keep = keep & (tl.load(spot, mask=keep & (j < stop)[:, None], other=0) != 0)
            p = tl.where(keep, p, 0.0)
        sums += tl.sum(p, 1)
    return sums


@triton.jit
def group_scores(
    k, j, query, lse, part, kv_head, start, checked, end, allowed, length, group, heads, kv_heads, scale, cap,
    query_batch, query_head, query_token, allowed_query,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns the attention [N] that keys receive from queries [start, end), the maximum over `heads` heads.

    `part` selects these heads within the group. Queries [start, checked) may be padding or no later than a key.
    `allowed` is the request's mask.
    """
    batch = tl.program_id(2).to(tl.int64)
    best = tl.zeros_like(j).to(tl.float32)
    for step in range(heads):
        head = kv_head * group + part * heads + step
        query_rows = query + batch * query_batch + head.to(tl.int64) * query_head
        lse_rows = lse + (batch * kv_heads * group + head) * length
        sums = receive(
            k, j, query_rows, lse_rows, query_token, start, checked, allowed, allowed_query, scale, cap,
            KEY_DIM, KEY_WIDTH, PARTS, BLOCK_M, DOT, True, CAUSAL,
        )  # fmt: skip
        if allowed is None:
            sums += receive(
                k, j, query_rows, lse_rows, query_token, checked, end, None, 0, scale, cap,
                KEY_DIM, KEY_WIDTH, PARTS, BLOCK_M, DOT, False, CAUSAL,
            )  # fmt: skip
        best = tl.maximum(best, sums)
    return best


@triton.jit
def scaled_up(best, later, window):
    """Scales sums over the scoring queries up to all `later` queries."""
    counted = tl.maximum(tl.minimum(later, window), 1)
    return best * (later.to(tl.float32) / counted.to(tl.float32))


@triton.jit(
    do_not_specialize=[
        *("key_valid", "allowed", "length", "key_length", "received_offset", "received_length"),
        *("group", "heads", "kv_heads", "window", "allowed_batch", "allowed_query"),
    ]
)
def column_scores(
    query, key, lse, received, key_valid, key_extents, extents, behind, allowed,
    length, key_length, received_offset, received_length, group, heads, kv_heads, window, scale, cap,
    query_batch, query_head, query_token, key_batch, key_head, key_token, allowed_batch, allowed_query,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, PAST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Computes the attention that a block of keys receives from the later queries of `heads` heads of its group.

    Grid: (key blocks, kv_heads * group / heads, batch). Programs that share a group take the maximum atomically, which
    is exact in any order.

    Args:
        key: keys of a dense past if PAST (every query is later), otherwise new keys,
            [batch, kv_heads, key_length, KEY_DIM].
        lse: result of `flash_forward`.
        received: float32 [batch, kv_heads, received_length], zeroed; the keys start at received_offset.
        key_valid, key_extents: uint8 [rows, key_length] and its `row_extents`, or None; there are batch * kv_heads rows
            if PAST, otherwise batch.
        extents: `row_extents` of the queries.
        behind: int32 [batch, length] from `row_extents`; None without padding or window.
        allowed: mask, as in `flash_forward`; None if PAST.
        window: number of scoring queries, if WINDOW; sums are scaled up to all later queries.
    """
    batch = tl.program_id(2)
    parts = group // heads
    kv_head = tl.program_id(1) // parts
    wide = batch.to(tl.int64)
    first, end, scorer, count, whole = load_extent(extents, batch, length)
    if WINDOW:
        if extents is None:
            scorer = tl.maximum(end - window, 0)
    if PAST:
        row = batch * kv_heads + kv_head
        key_first, key_end, _, _, _ = load_extent(key_extents, row, key_length)
    else:
        row = batch
        key_first = first
        key_end = end
    key_start = tl.program_id(0) * BLOCK_N
    if (key_start >= key_end) | (key_start + BLOCK_N <= key_first):
        return

    j = key_start + tl.arange(0, BLOCK_N)
    real = j < key_end
    key_rows = key + wide * key_batch + kv_head.to(tl.int64) * key_head
    k = as_operand(load_rows(key_rows, key_token, key_start, real, KEY_DIM, KEY_WIDTH, BLOCK_N), DOT)
    if key_valid is not None:
        real = real & (tl.load(key_valid + row.to(tl.int64) * key_length + j, mask=real, other=0) != 0)

    if PAST:
        start = scorer
        checked = tl.where(whole, start, end)
    else:
        start = tl.maximum(key_start + 1, scorer)
        overlap = tl.maximum(tl.minimum(key_start + BLOCK_N, end) - start, 0)
        overlap = (overlap + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        checked = tl.where(whole, tl.minimum(start + overlap, end), end)
    if allowed is not None:
        checked = end
        allowed += wide * allowed_batch
    best = group_scores(
        k, j, query, lse, tl.program_id(1) % parts, kv_head, start, checked, end, allowed, length, group, heads,
        kv_heads, scale, cap, query_batch, query_head, query_token, allowed_query,
        KEY_DIM, KEY_WIDTH, 1, BLOCK_M, DOT, not PAST,
    )  # fmt: skip
    if WINDOW:
        if PAST:
            later = tl.zeros_like(j) + count
        elif behind is not None:
            later = tl.load(behind + wide * length + j, mask=real, other=0)
        else:
            later = length - 1 - j
        best = scaled_up(best, later, window)
    spot = received + (wide * kv_heads + kv_head) * received_length + received_offset + j
    tl.atomic_max(spot, best, mask=real)


@triton.jit(
    do_not_specialize=[
        *("table", "high_count", "low_count", "window_start", "past_length", "sink_end", "length"),
        *("received_length", "group", "heads", "kv_heads", "width", "slots", "sink_slots", "window"),
    ]
)
def past_scores(
    query, lse, received, extents, pages, table, high_count, low_count, window_key, window_start, past_length,
    sink_end, length, received_length, group, heads, kv_heads, width, slots, sink_slots, window, scale, cap,
    query_batch, query_head, query_token,
    HIGH: tl.constexpr, LOW: tl.constexpr, KEY_WIDTH: tl.constexpr, KEY_PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT: tl.constexpr, MODE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Computes the attention that a block of stored keys receives, as `column_scores` does; every query is later.

    The high, low and window tokens of a row each start a new block. The grid may have more blocks than the row.
    `pages` to `sink_end` are as in `past_forward`.

    Args:
        received: output, as in `column_scores`; the stored tokens come first: high, low, window.
    """
    batch = tl.program_id(2)
    parts = group // heads
    kv_head = tl.program_id(1) // parts
    kv_row = batch * kv_heads + kv_head
    KEY_DIM: tl.constexpr = HIGH.key_dim
    ELEMENT: tl.constexpr = window_key.dtype.element_ty
    first, end, scorer, count, whole = load_extent(extents, batch, length)
    if WINDOW:
        if extents is None:
            scorer = tl.maximum(end - window, 0)
    high, low, held, place = row_counts(
        high_count, low_count, window_start, past_length, None, sink_end, kv_row, batch, slots, sink_slots
    )
    block = tl.program_id(0)
    high_blocks = tl.cdiv(high, BLOCK_N)
    paged_blocks = high_blocks + tl.cdiv(low, BLOCK_N)
    if (block >= paged_blocks + tl.cdiv(held, BLOCK_N)) | (first == end):
        return

    lane = tl.arange(0, BLOCK_N)
    table += kv_row.to(tl.int64) * width
    # tokens past the end repeat the last one
    if block < high_blocks:
        token = block * BLOCK_N + lane
        base, slot = page_rows(pages, table, tl.minimum(token, high - 1), 1, HIGH)
        k = tier_tile(base, slot, HIGH, True, KEY_WIDTH, KEY_PARTS, ELEMENT, DOT, MODE)
        j = token
        real = token < high
    elif block < paged_blocks:
        token = (block - high_blocks) * BLOCK_N + lane
        base, slot = page_rows(pages, table + width - 1, tl.minimum(token, low - 1), -1, LOW)
        k = tier_tile(base, slot, LOW, True, KEY_WIDTH, KEY_PARTS, ELEMENT, DOT, MODE)
        j = high + token
        real = token < low
    else:
        token = (block - paged_blocks) * BLOCK_N + lane
        row = kv_row.to(tl.int64) * slots + window_slots(tl.minimum(token, held - 1), place, slots, sink_slots)
        k = as_operand(load_columns(window_key + row * KEY_DIM, KEY_DIM, KEY_WIDTH, KEY_PARTS), DOT)
        j = high + low + token
        real = token < held

    best = group_scores(
        k, j, query, lse, tl.program_id(1) % parts, kv_head, scorer, tl.where(whole, scorer, end), end, None, length,
        group, heads, kv_heads, scale, cap, query_batch, query_head, query_token, 0,
        KEY_DIM, KEY_WIDTH, KEY_PARTS, BLOCK_M, DOT, False,
    )  # fmt: skip
    if WINDOW:
        best = scaled_up(best, count, window)
    spot = received + kv_row.to(tl.int64) * received_length + j
    tl.atomic_max(spot, best, mask=real)
