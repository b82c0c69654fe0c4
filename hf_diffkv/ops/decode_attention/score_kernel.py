"""The pass of decode attention that adds what tokens received to their scores (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import narrow_score, score_noise, score_of
from .rows import STEP, columns, row_counts, window_slots


@triton.jit
def received(logits, peaks, log_total, heads, token, present, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Largest probability of each token within the group, 0 for absent ones: float32 [tokens]."""
    COLUMNS: tl.constexpr = columns(GROUP)
    mask = present[:, None] & (heads < COLUMNS)[None, :]
    shifted = tl.load(logits + token[:, None] * COLUMNS + heads[None, :], mask=mask, other=-float("inf"))
    peak = tl.load(peaks + (token // BLOCK)[:, None] * COLUMNS + heads[None, :], mask=mask, other=0.0)
    return tl.max(tl.math.exp2(shifted.to(tl.float32) + (peak - log_total[None, :])), 1)


@triton.jit
def joined(gained, held, place, present, FOLD: tl.constexpr, HOLD: tl.constexpr):
    """The maximum with what attentions of other layers left at `place`, kept there if further ones are to come."""
    if FOLD:
        gained = tl.maximum(gained, tl.load(held + place, mask=present, other=0.0))
    if HOLD:
        tl.store(held + place, gained, mask=present)
    return gained


@triton.jit
def score_tier(pages, table, logits, peaks, held, place, log_total, heads, first, last, count, length,
               DIRECTION: tl.constexpr, TIER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
               TOKENS: tl.constexpr, FOLD: tl.constexpr, HOLD: tl.constexpr):  # fmt: skip
    """Tiles [first, last) of TOKENS tokens; every token has one owner, so nothing is atomic.

    place: of the tier's first token in `held`. length: of the row, which narrow scores are rounded by.
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


@triton.jit(
    do_not_specialize=[
        *("page_table", "high_count", "low_count", "window_score", "window_start", "length", "valid", "sink_end"),
        *("table_width", "kv_heads", "slots", "sink_slots", "splits", "positions", "blocks"),
    ]
)
def score_kernel(
    pages, page_table, high_count, low_count, window_score, window_start, length, valid, sink_end, logits,
    block_peak, held, log_total, table_width, kv_heads, slots, sink_slots, splits, positions, blocks,
    HIGH: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, FOLD: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Adds what each attended token but the newest received; grid (rows, splits), arguments as in `attend_kernel`.

    Args:
        window_score: float32 [rows, slots].
        held: float32 [rows, positions], what tokens received from other layers; None unless FOLD or HOLD.
        TOKENS: tile of tokens, independent of BLOCK.
        FOLD, HOLD: take `held` into account; leave the result there instead of adding it.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    high, low, window, place = row_counts(
        high_count, low_count, window_start, length, valid, sink_end, row, row // kv_heads, slots, sink_slots
    )
    high_tiles = tl.cdiv(high, TOKENS)
    paged_tiles = high_tiles + tl.cdiv(low, TOKENS)
    all_tiles = paged_tiles + tl.cdiv(window, TOKENS)
    share = tl.cdiv(all_tiles, splits)
    first = split * share
    last = tl.minimum(first + share, all_tiles)
    if first < last:
        high_blocks = tl.cdiv(high, BLOCK)
        paged_blocks = high_blocks + tl.cdiv(low, BLOCK)
        wide_row = row.to(tl.int64)
        heads = tl.arange(0, HEADS)
        COLUMNS: tl.constexpr = columns(GROUP)
        # padding heads receive nothing
        total = tl.load(log_total + wide_row * GROUP + heads, mask=heads < GROUP, other=float("inf"))
        table = page_table + wide_row * table_width
        row_logits = logits + wide_row * positions * COLUMNS
        row_peaks = block_peak + wide_row * blocks * COLUMNS
        row_place = wide_row * positions
        seen = None
        if HIGH.score_bytes == 2:
            seen = tl.load(length + row // kv_heads)
        score_tier(
            pages, table, row_logits, row_peaks, held, row_place, total, heads, tl.minimum(first, high_tiles),
            tl.minimum(last, high_tiles), high, seen, 1, HIGH, GROUP, BLOCK, TOKENS, FOLD, HOLD,
        )  # fmt: skip
        score_tier(
            pages, table + table_width - 1, row_logits + high_blocks * BLOCK * COLUMNS,
            row_peaks + high_blocks * COLUMNS, held, row_place + high_blocks * BLOCK, total, heads,
            tl.maximum(first - high_tiles, 0), tl.minimum(last, paged_tiles) - high_tiles, low, seen, -1, LOW, GROUP,
            BLOCK, TOKENS, FOLD, HOLD,
        )  # fmt: skip
        for tile in range(tl.maximum(first - paged_tiles, 0), last - paged_tiles):
            token = tile * TOKENS + tl.arange(0, TOKENS)
            # the newest token does not count its own query
            present = token < window - 1
            gained = received(
                row_logits + paged_blocks * BLOCK * COLUMNS, row_peaks + paged_blocks * COLUMNS, total, heads, token,
                present, GROUP, STEP,
            )  # fmt: skip
            gained = joined(gained, held, row_place + paged_blocks * BLOCK + token, present, FOLD, HOLD)
            if not HOLD:
                score = window_score + wide_row * slots + window_slots(token, place, slots, sink_slots)
                tl.store(score, tl.load(score, mask=present, other=0.0) + gained, mask=present)
