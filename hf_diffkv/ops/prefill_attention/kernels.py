"""Triton kernels for prefill: extents of the real tokens, and exact attention (DiffKV, sections 3 and 4).

`flash_forward` keeps a log-sum-exp per query, from which `column_scores` (columns.py) recomputes the probabilities.
Logits are in units of log2 throughout. Optional arguments may be None, which compiles their code away. Dots run in
`DOT`; everything else is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["valid", "length", "window"])
def row_extents(valid, extents, behind, length, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the real tokens of each row, one program per row, from back to front.

    Args:
        valid: uint8 [rows, length].
        extents: output, int32 [rows, 4]: first real token, end of the last one, first token that scores, number of real
            tokens. A row without real tokens has first = end = 0.
        behind: output, number of real tokens after each token, int32 [rows, length]; None if not needed.
        window: number of real tokens at the end that score, if WINDOW.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    firsts = tl.full((BLOCK,), LARGEST, tl.int32)
    scorers = tl.full((BLOCK,), LARGEST, tl.int32)
    ends = tl.zeros((BLOCK,), tl.int32)
    count = tl.sum(ends)
    base = row.to(tl.int64) * length
    for step in range((length + BLOCK - 1) // BLOCK):
        at = length - (step + 1) * BLOCK + lane
        real = tl.load(valid + base + at, mask=at >= 0, other=0).to(tl.int32)
        after = count + tl.cumsum(real, 0, reverse=True) - real
        if behind is not None:
            tl.store(behind + base + at, after, mask=at >= 0)
        firsts = tl.minimum(firsts, tl.where(real != 0, at, LARGEST))
        ends = tl.maximum(ends, tl.where(real != 0, at + 1, 0))
        if WINDOW:
            scorers = tl.minimum(scorers, tl.where((real != 0) & (after < window), at, LARGEST))
        count += tl.sum(real)
    end = tl.max(ends, 0)
    first = tl.minimum(tl.min(firsts, 0), end)
    scorer = tl.minimum(tl.min(scorers, 0), end) if WINDOW else first
    tl.store(extents + row * 4, first)
    tl.store(extents + row * 4 + 1, end)
    tl.store(extents + row * 4 + 2, scorer)
    tl.store(extents + row * 4 + 3, count)


@triton.jit
def as_operand(x, DOT: tl.constexpr):
    """Converts `x` to the dots' dtype through float32, without which the interpreter converts bf16 incorrectly."""
    if x.dtype != DOT:
        x = x.to(tl.float32).to(DOT)
    return x


@triton.jit
def load_extent(extents, row, length):
    """Returns the first token, end, first scoring token, number of real tokens, and whether they are contiguous."""
    if extents is None:
        first = row * 0
        end = first + length
        scorer = first
        count = end
    else:
        first = tl.load(extents + row * 4)
        end = tl.load(extents + row * 4 + 1)
        scorer = tl.load(extents + row * 4 + 2)
        count = tl.load(extents + row * 4 + 3)
    return first, end, scorer, count, count == end - first


@triton.jit
def load_rows(rows, stride, start, there, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Loads ROWS rows of a [tokens, DIM] matrix, from `start`, as a tile of WIDTH columns; zeros where not `there`.

    `there` may be None if all rows exist. Only the first row's address needs 64 bits.
    """
    dim = tl.arange(0, WIDTH)
    spot = rows + start.to(tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + dim[None, :])
    if there is not None:
        tile = tl.load(spot, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM == WIDTH:
        tile = tl.load(spot)
    else:
        tile = tl.load(spot, mask=(dim < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def soft_cap(x, cap):
    """Returns cap * tanh(y) for x = 2 * log2(e) * y; see `Softmax.factors`."""
    return cap * (1.0 - 2.0 / (tl.math.exp2(x) + 1.0))


@triton.jit
def online_softmax(peak, total, s, keep, scale, cap):
    """Updates the online softmax with a block of products [M, N], masked where not `keep`; None masks nothing.

    Returns:
        New peak and total [M], the factor for earlier sums, and the block's weights.
    """
    if cap is not None:
        s = soft_cap(s * scale, cap)
    if keep is not None:
        s = tl.where(keep, s, -float("inf"))
    # the maximum is taken over raw products, so that scaling fuses with the subtraction
    best = tl.max(s, 1) if cap is not None else tl.max(s, 1) * scale
    top = tl.maximum(peak, best)
    shift = tl.where(top == -float("inf"), 0.0, top) if keep is not None else top
    p = tl.math.exp2((s if cap is not None else s * scale) - shift[:, None])
    shrink = tl.math.exp2(peak - shift)
    return top, total * shrink + tl.sum(p, 1), shrink, p


@triton.jit
def attend(
    state, q, i, key, value, key_stride, value_stride, start, stop, real, allowed, allowed_stride, scale, cap,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT: tl.constexpr, CHECK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds keys [start, stop) of one head to the online softmax of a block of queries.

    Args:
        state: weighted values [M, VALUE_WIDTH], running maximum [M] and running total [M].
        q, i: queries [M, KEY_WIDTH] and their positions [M].
        key, value: pointers to the first element of the head's rows.
        real: nonzero for real keys, uint8 [keys], or None.
        allowed: mask of the row, uint8 [queries, keys], or None.
        CHECK: False if [start, stop) is a multiple of BLOCK_N and every query attends to all of it.
        CAUSAL: whether, with CHECK, queries do not attend to later keys.
    """
    acc, peak, total = state
    for step in tl.range((stop - start + BLOCK_N - 1) // BLOCK_N, num_stages=1 if CHECK and allowed is None else None):
        at = start + step * BLOCK_N
        j = at + tl.arange(0, BLOCK_N)
        if CHECK:
            there = j < stop
            if real is not None:
                there = there & (tl.load(real + j, mask=there, other=0) != 0)
        else:
            there = None
        k = as_operand(load_rows(key, key_stride, at, there, KEY_DIM, KEY_WIDTH, BLOCK_N), DOT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        keep = None
        if CHECK:
            keep = there[None, :]
            if CAUSAL:
                keep = keep & (i[:, None] >= j[None, :])
            if allowed is not None:
                spot = allowed + i.to(tl.int64)[:, None] * allowed_stride + j[None, :]
                keep = keep & (tl.load(spot, mask=keep & (i < stop)[:, None], other=0) != 0)
        peak, total, shrink, p = online_softmax(peak, total, s, keep, scale, cap)
        v = as_operand(load_rows(value, value_stride, at, there, VALUE_DIM, VALUE_WIDTH, BLOCK_N), DOT)
        acc = tl.dot(p.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def merge_splits(
    state, partial_output, partial_peak, partial_total, splits, batch, head, start, length, group,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges `past_forward`'s results for BLOCK_M queries of one head, from `start`, into their softmax state."""
    acc, peak, total = state
    dim = tl.arange(0, VALUE_WIDTH)
    real_dim = (dim < VALUE_DIM)[None, :]
    kv_heads = tl.num_programs(1) // group
    lane = tl.arange(0, BLOCK_M)
    exists = lane < length - start
    for split in range(splits):
        row = (split * tl.num_programs(2).to(tl.int64) + batch) * kv_heads + head // group
        first = (row * length + start) * group + head % group
        other = tl.load(partial_peak + first + lane * group, mask=exists, other=-float("inf"))
        top = tl.maximum(peak, other)
        shift = tl.where(top == -float("inf"), 0.0, top)
        mine = tl.math.exp2(peak - shift)
        theirs = tl.math.exp2(other - shift)
        worked = exists & (other != -float("inf"))
        rows = (first + lane * group) * VALUE_DIM
        part = tl.load(partial_output + (rows[:, None] + dim[None, :]), mask=worked[:, None] & real_dim, other=0.0)
        acc = acc * mine[:, None] + part * theirs[:, None]
        total = total * mine + theirs * tl.load(partial_total + first + lane * group, mask=worked, other=0.0)
        peak = top
    return acc, peak, total


# without this, Triton would recompile for lengths and addresses that are multiples of 16
@triton.jit(
    do_not_specialize=[
        *("valid", "past_valid", "allowed", "sinks"),
        *("length", "past_length", "splits", "group", "allowed_batch", "allowed_query"),
    ]
)
def flash_forward(
    query, key, value, past_key, past_value, partial_output, partial_peak, partial_total, output, lse, valid, extents,
    past_valid, past_extents, allowed, sinks, length, past_length, splits, group, scale, cap,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    output_batch, output_head, output_token, allowed_batch, allowed_query,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attends from a block of queries of one head. Grid: (query blocks, query heads, batch).

    Args:
        query, key, value, output: [batch, heads, length, dim], with the given strides and dim contiguous.
        past_key, past_value: contiguous [batch, kv_heads, past_length, dim], or None.
        partial_output, partial_peak, partial_total: results of `past_forward` in `splits` splits, or None.
        lse: output, log2 of the softmax denominator, float32 [batch, query_heads, length]; +inf if there is nothing to
            attend to or the query is padding, so that its probabilities become 0. None if not needed.
        valid, extents: uint8 [batch, length] and its `row_extents`, or None.
        past_valid, past_extents: uint8 [batch * kv_heads, past_length] and its `row_extents`.
        allowed: mask that replaces the causal rule, uint8 [batch, length, length], or None.
        sinks: sink logits, [query_heads], or None.
        group: number of query heads per KV head.
        scale, cap: results of `Softmax.factors`; cap is None without a softcap.
    """
    # longest blocks first, so that short ones fill the gaps at the end
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // group
    first, end, _, _, whole = load_extent(extents, batch, length)
    start = block * BLOCK_M
    i = start + tl.arange(0, BLOCK_M)
    exists = i < length
    wide = batch.to(tl.int64)
    # a block of nothing but padding has no keys to visit
    busy = (start < end) & (start + BLOCK_M > first)

    query_rows = query + wide * query_batch + head.to(tl.int64) * query_head
    q = as_operand(load_rows(query_rows, query_token, start, exists, KEY_DIM, KEY_WIDTH, BLOCK_M), DOT)
    acc = tl.zeros((BLOCK_M, VALUE_WIDTH), tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak = tl.zeros((BLOCK_M,), tl.float32) + sink
        total += tl.where(sink == -float("inf"), 0.0, 1.0)
    state = (acc, peak, total)

    if partial_output is not None:
        state = merge_splits(
            state, partial_output, partial_peak, partial_total, splits, batch, head, start, length, group,
            VALUE_DIM, VALUE_WIDTH, BLOCK_M,
        )  # fmt: skip
    if past_key is not None:
        row = batch * (tl.num_programs(1) // group) + kv_head
        past_first, past_end, _, _, past_whole = load_extent(past_extents, row, past_length)
        past_end = tl.where(busy, past_end, past_first)
        rows = row.to(tl.int64) * past_length
        sure = past_first + tl.where(past_whole & busy, (past_end - past_first) // BLOCK_N * BLOCK_N, 0)
        state = attend(
            state, q, i, past_key + rows * KEY_DIM, past_value + rows * VALUE_DIM, KEY_DIM, VALUE_DIM,
            past_first, sure, None, None, 0, scale, cap,
            KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_N, DOT, False, False,
        )  # fmt: skip
        state = attend(
            state, q, i, past_key + rows * KEY_DIM, past_value + rows * VALUE_DIM, KEY_DIM, VALUE_DIM,
            sure, past_end, past_valid + rows, None, 0, scale, cap,
            KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_N, DOT, True, False,
        )  # fmt: skip

    key_rows = key + wide * key_batch + kv_head.to(tl.int64) * key_head
    value_rows = value + wide * value_batch + kv_head.to(tl.int64) * value_head
    real = None
    if valid is not None:
        real = valid + wide * length
    end = tl.where(busy, end, first)
    if allowed is None:
        # first the keys that precede or equal all queries, if there are no holes; then the others, with checks
        sure = first + tl.where(whole & busy, tl.maximum(start + 1 - first, 0) // BLOCK_N * BLOCK_N, 0)
        state = attend(
            state, q, i, key_rows, value_rows, key_token, value_token, first, sure, None, None, 0, scale, cap,
            KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_N, DOT, False, True,
        )  # fmt: skip
        state = attend(
            state, q, i, key_rows, value_rows, key_token, value_token, sure, tl.minimum(start + BLOCK_M, end),
            real, None, 0, scale, cap,
            KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_N, DOT, True, True,
        )  # fmt: skip
    else:
        state = attend(
            state, q, i, key_rows, value_rows, key_token, value_token, first, end,
            real, allowed + wide * allowed_batch, allowed_query, scale, cap,
            KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_N, DOT, True, False,
        )  # fmt: skip

    acc, peak, total = state
    sees = exists & (total != 0)
    if real is not None:
        sees = sees & (tl.load(real + i, mask=exists, other=0) != 0)
    # NaN totals are kept, because they come from the data
    total = tl.where(total == 0, 1.0, total)
    result = tl.where(sees[:, None], acc / total[:, None], 0.0)
    dim = tl.arange(0, VALUE_WIDTH)
    output_rows = output + wide * output_batch + head.to(tl.int64) * output_head
    output_spot = output_rows + i.to(tl.int64)[:, None] * output_token + dim[None, :]
    tl.store(output_spot, result.to(output.dtype.element_ty), mask=exists[:, None] & (dim < VALUE_DIM)[None, :])
    if lse is not None:
        lse_spot = lse + (wide * tl.num_programs(1) + head) * length + i
        tl.store(lse_spot, tl.where(sees, peak + tl.math.log2(total), float("inf")), mask=exists)
