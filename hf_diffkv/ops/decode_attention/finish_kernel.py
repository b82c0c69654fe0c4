"""Triton kernel that follows `attend_kernel`: it merges a row's splits and adds the received attention to scores.

Both run in one launch. Each program does one or the other, since neither needs the other's result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import narrow_score, score_noise, score_of
from .rows import LOG2_E, STEP, columns, row_counts, window_slots


@triton.jit
def softmax_state(partial_peak, partial_total, sinks, row, heads, there, kv_heads, splits, GROUP: tl.constexpr,
                  SPLIT_BLOCK: tl.constexpr):  # fmt: skip
    """Returns the softmax peak and denominator of some heads of a row, float32 [heads].

    The peak is always finite, and the denominator is never zero or infinite. Other arguments are as in `finish_kernel`.

    Args:
        heads: index of each head within the group, int32 [heads].
        there: True for heads that exist, bool [heads].
    """
    first_row = row.to(tl.int64) * splits
    lane = tl.arange(0, SPLIT_BLOCK)
    peak = tl.full((heads.shape[0],), -float("inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + row % kv_heads * GROUP + heads, mask=there, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    for start in range(0, splits, SPLIT_BLOCK):
        split = start + lane
        mask = (split < splits)[:, None] & there[None, :]
        part = (first_row + split)[:, None] * GROUP + heads[None, :]
        peak = tl.maximum(peak, tl.max(tl.load(partial_peak + part, mask=mask, other=-float("inf")), 0))
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros((heads.shape[0],), tl.float32)
    if sinks is not None:
        total += tl.math.exp2(sink - peak)
    for start in range(0, splits, SPLIT_BLOCK):
        split = start + lane
        mask = (split < splits)[:, None] & there[None, :]
        part = (first_row + split)[:, None] * GROUP + heads[None, :]
        share = tl.math.exp2(tl.load(partial_peak + part, mask=mask, other=-float("inf")) - peak[None, :])
        # the maximum prevents fusing the product with the first addition, which would make threads disagree on the sum
        total += tl.sum(tl.maximum(share * tl.load(partial_total + part, mask=mask, other=0.0), 0.0), 0)
    return peak, tl.where(total == 0, 1.0, total)


@triton.constexpr_function
def rows_at_once(split_block, lanes):
    """Returns the number of partial outputs that are merged at once, limited by registers."""
    return min(split_block, max(8192 // lanes, 1))


@triton.jit
def merge_head(partial_output, partial_peak, partial_total, sinks, output, active, row, head, kv_heads, splits,
               GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, LANES: tl.constexpr,
               SPLIT_BLOCK: tl.constexpr):  # fmt: skip
    """Combines the splits of one query head."""
    one = head + tl.arange(0, 1)
    peak, total = softmax_state(
        partial_peak, partial_total, sinks, row, one, one < GROUP, kv_heads, splits, GROUP, SPLIT_BLOCK
    )
    first_row = row.to(tl.int64) * splits
    ROWS: tl.constexpr = rows_at_once(SPLIT_BLOCK, LANES)
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, LANES)
    acc = tl.zeros((LANES,), tl.float32)
    for start in range(0, splits, ROWS):
        split = start + lane
        part_row = (first_row + split) * GROUP + head
        peaks = tl.load(partial_peak + part_row, mask=split < splits, other=-float("inf"))
        # splits without tokens may hold any output; it is loaded too, so that no load waits for a peak
        there = (split < splits)[:, None] & (column < VALUE_DIM)[None, :]
        part = tl.load(partial_output + part_row[:, None] * VALUE_DIM + column[None, :], mask=there, other=0.0)
        weighted = tl.math.exp2(peaks - peak)[:, None] * part
        acc += tl.sum(tl.where((peaks != -float("inf"))[:, None], weighted, 0.0), 0)
    result = tl.where(active, acc / total, 0.0).to(output.dtype.element_ty)
    out_row = row.to(tl.int64) * GROUP + head
    tl.store(output + out_row * VALUE_DIM + column, result, mask=column < VALUE_DIM)


@triton.jit
def received(logits, peaks, log_total, heads, token, present, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest probability of each token within the group, float32 [tokens]; 0 for absent tokens."""
    COLUMNS: tl.constexpr = columns(GROUP)
    mask = present[:, None] & (heads < COLUMNS)[None, :]
    shifted = tl.load(logits + token[:, None] * COLUMNS + heads[None, :], mask=mask, other=-float("inf"))
    peak = tl.load(peaks + (token // BLOCK)[:, None] * COLUMNS + heads[None, :], mask=mask, other=0.0)
    return tl.max(tl.math.exp2(shifted.to(tl.float32) + (peak - log_total[None, :])), 1)


@triton.jit
def joined(gained, held, place, present, FOLD: tl.constexpr, HOLD: tl.constexpr):
    """Returns the maximum of `gained` and, with FOLD, `held` at `place`; with HOLD, also stores it there."""
    if FOLD:
        gained = tl.maximum(gained, tl.load(held + place, mask=present, other=0.0))
    if HOLD:
        tl.store(held + place, gained, mask=present)
    return gained


@triton.jit
def score_tier(pages, table, logits, peaks, held, place, log_total, heads, first, last, count, length,
               DIRECTION: tl.constexpr, TIER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
               TOKENS: tl.constexpr, FOLD: tl.constexpr, HOLD: tl.constexpr):  # fmt: skip
    """Adds received attention to the scores of tiles [first, last) of TOKENS tokens.

    Each token belongs to one program, so no atomics are needed.

    Args:
        place: index of the tier's first token in `held`.
        length: length of the row, which seeds the rounding of narrow scores.
    """
    for tile in range(first, last):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        present = token < count
        gained = received(logits, peaks, log_total, heads, token, present, GROUP, BLOCK)
        gained = joined(gained, held, place + token, present, FOLD, HOLD)
        if not HOLD:
            page = tl.load(table + DIRECTION * (token // TIER.capacity), mask=present, other=0)
            BYTES: tl.constexpr = TIER.score_bytes
            score = pages + page.to(tl.int64) * TIER.page_bytes + TIER.score_offset + token % TIER.capacity * BYTES
            if BYTES == 2:
                score = score.to(tl.pointer_type(tl.uint16))
                total = score_of(tl.load(score, mask=present, other=0)) + gained
                noise = score_noise(token, length, 0 if DIRECTION > 0 else 1)
                tl.store(score, narrow_score(total, noise), mask=present)
            else:
                score = score.to(tl.pointer_type(tl.float32))
                tl.store(score, tl.load(score, mask=present, other=0.0) + gained, mask=present)


@triton.jit
def add_scores(pages, page_table, window_score, logits, block_peak, held, log_total, counts, place, length, row, share,
               shares, table_width, slots, sink_slots, positions, blocks, HIGH: tl.constexpr, LOW: tl.constexpr,
               GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
               FOLD: tl.constexpr, HOLD: tl.constexpr):  # fmt: skip
    """Adds the attention received by the tokens in one of a row's equal `shares`, except for the newest token.

    Args:
        log_total: log2 of the softmax denominators, float32 [HEADS]; infinite for padding heads.
        counts, place: results of `row_counts`.
        length: length of the request, which seeds the rounding of narrow scores.
    """
    high, low, window = counts
    high_tiles = tl.cdiv(high, TOKENS)
    paged_tiles = high_tiles + tl.cdiv(low, TOKENS)
    all_tiles = paged_tiles + tl.cdiv(window, TOKENS)
    tiles = tl.cdiv(all_tiles, shares)
    first = share * tiles
    last = tl.minimum(first + tiles, all_tiles)
    high_blocks = tl.cdiv(high, BLOCK)
    paged_blocks = high_blocks + tl.cdiv(low, BLOCK)
    wide_row = row.to(tl.int64)
    heads = tl.arange(0, HEADS)
    COLUMNS: tl.constexpr = columns(GROUP)
    table = page_table + wide_row * table_width
    row_logits = logits + wide_row * positions * COLUMNS
    row_peaks = block_peak + wide_row * blocks * COLUMNS
    row_place = wide_row * positions
    score_tier(
        pages, table, row_logits, row_peaks, held, row_place, log_total, heads, tl.minimum(first, high_tiles),
        tl.minimum(last, high_tiles), high, length, 1, HIGH, GROUP, BLOCK, TOKENS, FOLD, HOLD,
    )  # fmt: skip
    score_tier(
        pages, table + table_width - 1, row_logits + high_blocks * BLOCK * COLUMNS,
        row_peaks + high_blocks * COLUMNS, held, row_place + high_blocks * BLOCK, log_total, heads,
        tl.maximum(first - high_tiles, 0), tl.minimum(last, paged_tiles) - high_tiles, low, length, -1, LOW, GROUP,
        BLOCK, TOKENS, FOLD, HOLD,
    )  # fmt: skip
    for tile in range(tl.maximum(first - paged_tiles, 0), last - paged_tiles):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        # the newest token does not count its own query
        present = token < window - 1
        gained = received(
            row_logits + paged_blocks * BLOCK * COLUMNS, row_peaks + paged_blocks * COLUMNS, log_total, heads, token,
            present, GROUP, STEP,
        )  # fmt: skip
        gained = joined(gained, held, row_place + paged_blocks * BLOCK + token, present, FOLD, HOLD)
        if not HOLD:
            score = window_score + wide_row * slots + window_slots(token, place, slots, sink_slots)
            tl.store(score, tl.load(score, mask=present, other=0.0) + gained, mask=present)


@triton.jit(
    do_not_specialize=[
        *("page_table", "high_count", "low_count", "window_score", "window_start", "length", "valid", "sink_end"),
        *("sinks", "table_width", "kv_heads", "slots", "sink_slots", "splits", "shares", "positions", "blocks"),
    ]
)
def finish_kernel(
    pages, page_table, high_count, low_count, window_score, window_start, length, valid, sink_end, logits,
    block_peak, held, partial_output, partial_peak, partial_total, sinks, output, table_width, kv_heads, slots,
    sink_slots, splits, shares, positions, blocks,
    HIGH: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, SPLIT_BLOCK: tl.constexpr, TOKENS: tl.constexpr, FOLD: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Merges the splits of a row and adds scores.

    The first GROUP programs of a row each merge the splits of one query head. Each of the others adds the scores for a
    share of the row's tokens. Grid: (rows, GROUP + shares), or (rows, GROUP) without scores. Other arguments are as in
    `attend_kernel`.

    Args:
        sinks: sink logits, any float [query_heads], or None.
        output: [rows, GROUP, value_dim] in the model's dtype.
        window_score: float32 [rows, slots].
        held: attention that tokens received from other layers, float32 [rows, positions]; None unless FOLD or HOLD.
        TOKENS: tokens per tile, independent of BLOCK.
        FOLD: whether to include `held` in the maximum.
        HOLD: whether to store the result in `held` instead of adding it to the scores.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    batch = row // kv_heads
    seen = tl.load(length + batch)
    if part < GROUP:
        active = seen > 0
        if valid is not None:
            active = tl.load(valid + batch) != 0
        merge_head(
            partial_output, partial_peak, partial_total, sinks, output, active, row, part, kv_heads, splits, GROUP,
            HIGH.value_dim, LANES, SPLIT_BLOCK,
        )  # fmt: skip
    elif logits is not None:
        high, low, window, place = row_counts(
            high_count, low_count, window_start, length, valid, sink_end, row, batch, slots, sink_slots
        )
        heads = tl.arange(0, HEADS)
        peak, total = softmax_state(
            partial_peak, partial_total, sinks, row, heads, heads < GROUP, kv_heads, splits, GROUP, SPLIT_BLOCK
        )
        # padding heads receive nothing
        log_total = tl.where(heads < GROUP, peak + tl.math.log2(total), float("inf"))
        add_scores(
            pages, page_table, window_score, logits, block_peak, held, log_total, (high, low, window), place, seen, row,
            part - GROUP, shares, table_width, slots, sink_slots, positions, blocks, HIGH, LOW, GROUP, HEADS, BLOCK,
            TOKENS, FOLD, HOLD,
        )  # fmt: skip
