"""Triton helpers for a row: its tokens, the online softmax, and the format of its logits."""

from __future__ import annotations

import triton
import triton.language as tl

from .tier_math import padded, quarter, quarter_count

LOG2_E = tl.constexpr(1.4426950408889634)
STEP = tl.constexpr(16)  # window tokens per step: a larger tile of uncompressed rows spills registers


@triton.constexpr_function
def columns(group):
    """Returns the number of heads per token in the logits, padded so that stores are whole words."""
    return triton.next_power_of_2(group)


@triton.jit
def softmax_step(peak, sums, products, present, logit_scale, cap):
    """Updates the online softmax with products [tokens, HEADS].

    Returns the new peak [HEADS], the new sums, the decay of the old ones, the weights and the shifted logits.

    `logit_scale`, which is positive, and `cap` are results of `Softmax.factors`. `sums` [tokens, HEADS] is reduced over
    tokens only after the loop, which saves shuffles.
    """
    if cap is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        products = cap - 2 * cap / (tl.math.exp2(products * logit_scale) + 1)
        logit_scale = 1.0
    products = tl.where(present[:, None], products, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(products, 0) * logit_scale)
    decay = tl.math.exp2(peak - new_peak)
    shifted = products * logit_scale - new_peak[None, :]
    weights = tl.math.exp2(shifted)
    return new_peak, sums * decay[None, :] + weights, decay, weights, shifted


@triton.jit
def join_totals(peak, total, new_peak, sums):
    """Returns the total after a loop that raised the peak and accumulated `sums`; the peak may still be -inf."""
    finite_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    return total * tl.math.exp2(peak - finite_peak) + tl.sum(sums, 0)


@triton.jit
def row_counts(high_count, low_count, window_start, length, valid, sink_end, row, batch, slots, sink_slots):
    """Returns the high, low and window tokens of a row, and the place of the window's tokens.

    Counts are 0 if the row is inactive. The place is the number of sinks and the slot of the first token after them.
    """
    end = tl.load(length + batch)
    start = tl.load(window_start + batch)
    active = end > 0
    if valid is not None:
        active = tl.load(valid + batch) != 0
    high = tl.where(active, tl.load(high_count + row), 0)
    low = tl.where(active, tl.load(low_count + row), 0)
    ring = slots - sink_slots
    window = tl.where(active, tl.minimum(tl.maximum(end - start, 0).to(tl.int32), ring), 0)
    first_slot = sink_slots + ((end - window) % ring).to(tl.int32)
    sinks = tl.full((), 0, tl.int32)
    if sink_end is not None:
        sinks = tl.minimum(tl.minimum(end, tl.load(sink_end + batch)).to(tl.int32), sink_slots)
        sinks = tl.where(active, sinks, 0)
    return high, low, window + sinks, (sinks, first_slot)


@triton.jit
def window_slots(token, place, slots, sink_slots):
    """Returns the slots of a window's tokens, sinks first; `place` comes from `row_counts`."""
    sinks, first_slot = place
    slot = first_slot + token - sinks
    slot = tl.where(slot >= slots, slot - (slots - sink_slots), slot)
    return tl.where(token < sinks, token, slot)


@triton.jit
def store_peak(peaks, block, heads, peak, GROUP: tl.constexpr):
    """Stores the running peak [HEADS] after a block, unless `peaks` is None."""
    if peaks is not None:
        COLUMNS: tl.constexpr = columns(GROUP)
        tl.store(peaks + block * COLUMNS + heads, peak, mask=heads < COLUMNS)


@triton.jit
def store_logits(logits, token, heads, shifted, present, GROUP: tl.constexpr):
    """Stores the logits [tokens, HEADS] of present tokens, unless `logits` is None."""
    if logits is not None:
        COLUMNS: tl.constexpr = columns(GROUP)
        pointer = logits + token[:, None] * COLUMNS + heads[None, :]
        if COLUMNS > 2 and shifted.shape[0] == 32:
            # after a matrix product, a thread holds pairs of heads; wider stores would need a layout change, see
            # docs/notes/kernels.md
            pointer = tl.max_contiguous(pointer, (1, 2))
        tl.store(pointer, shifted, mask=(heads < COLUMNS)[None, :] & present[:, None])


@triton.jit
def blocks_of(high, low, window, split, splits, MIN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the number of high blocks, the number of paged blocks, and a split's blocks [first, last)."""
    high_blocks = tl.cdiv(high, BLOCK)
    paged_blocks = high_blocks + tl.cdiv(low, BLOCK)
    all_blocks = paged_blocks + tl.cdiv(window, BLOCK)
    share = tl.maximum(tl.cdiv(all_blocks, splits), MIN_BLOCKS)
    first = split * share
    return high_blocks, paged_blocks, first, tl.minimum(first + share, all_blocks)


@triton.jit
def no_tokens(HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Returns the softmax state of HEADS heads before any token: peak, total and four quarters of the output."""
    quarters = tl.zeros((padded(quarter(VALUE_DIM)), HEADS), tl.float32)
    peak = tl.full((HEADS,), -float("inf"), tl.float32)
    return peak, tl.zeros((HEADS,), tl.float32), (quarters, quarters, quarters, quarters)


@triton.jit
def store_split(state, partial_output, partial_peak, partial_total, part, heads, attended, GROUP: tl.constexpr,
                VALUE_DIM: tl.constexpr):  # fmt: skip
    """Stores the softmax state of split `part` among all rows' splits; the output only if it `attended` to tokens."""
    QUARTER: tl.constexpr = quarter(VALUE_DIM)
    peak, total, acc = state
    row = part * GROUP + heads
    # logits that are all NaN leave no peak; the merge would mistake the split for one without tokens
    tl.store(partial_peak + row, tl.where(total == total, peak, 0.0), mask=heads < GROUP)
    tl.store(partial_total + row, total, mask=heads < GROUP)
    if attended:
        lane = tl.arange(0, padded(QUARTER))
        for index in tl.static_range(4):
            pointer = partial_output + row[None, :] * VALUE_DIM + index * QUARTER + lane[:, None]
            mask = (heads < GROUP)[None, :] & (lane < quarter_count(VALUE_DIM, index))[:, None]
            tl.store(pointer, acc[index], mask=mask)
