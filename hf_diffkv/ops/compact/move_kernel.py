"""Triton kernel that executes a compaction plan; see `kernels` for the launches before it."""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import load_positions, load_scores
from ..quantize.kernels import read_input, read_tile, rows_at, tier_dims, write_scalars, write_tile
from ..rounding.kernels import MOST_BITS, round_for_tier
from .kernels import column


@triton.jit
def token_place(pages, table, row, index, width, TIER: tl.constexpr, IS_LOW: tl.constexpr):
    """Returns the page pointer and slot of each row's `index`-th token; page 0 if the index is -1."""
    position = tl.maximum(index, 0)
    entry = column(position // TIER.capacity, width, IS_LOW)
    page = tl.load(table + row.to(tl.int64) * width + entry, mask=index >= 0, other=0)
    return pages + page.to(tl.int64) * TIER.page_bytes, position % TIER.capacity


@triton.jit
def matrices_of(feedback, layer, head, row, rows, layer_rows, heads, model_heads, DIM: tl.constexpr):
    """Returns pointers to the matrix of each row's head, [row]; None without feedback."""
    if feedback is None:
        matrix = None
    else:
        inside = row < rows
        place = tl.load(layer + row // layer_rows, mask=inside, other=0) * model_heads
        place += tl.load(head + row % heads, mask=inside, other=0)
        matrix = feedback + place * (DIM * DIM)
    return matrix


@triton.jit
def rounded_keys(x, matrix, active, TIER: tl.constexpr):
    """Returns a tile of keys rounded for quantisation by each active row's matrix."""
    if matrix is not None and TIER.k_bits <= MOST_BITS:
        if tl.max(active.to(tl.int32), 0) > 0:
            x = round_for_tier(x, matrix[:, None, None], TIER)
    return x


@triton.jit
def downgrade(
    rows, row, stride, high_codes, high_metadata, low_base, low_slot, active, demoted, matrix,
    HIGH: tl.constexpr, LOW: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes keys or values to the low tier: from the high slot where `demoted`, otherwise from the window."""
    dim, exists = tier_dims(LOW, IS_KEY)
    stored = read_tile(high_codes, high_metadata, demoted, dim, exists, HIGH, IS_KEY, DTYPE)
    fresh = read_input(rows, row, active & (demoted == 0), dim, exists, stride)
    x = tl.where(demoted[:, None, None], stored, fresh)
    if IS_KEY:
        x = rounded_keys(x, matrix, active, LOW)
    codes, metadata = rows_at(low_base, low_slot, LOW, IS_KEY)
    write_tile(x, codes, metadata, active, LOW, IS_KEY, DTYPE)


@triton.jit
def write_candidate(
    key, value, row, key_stride, value_stride, base, slot, active, matrix, TIER: tl.constexpr, DTYPE: tl.constexpr
):
    """Quantises each active row's key and value from the window into its slot of the page at `base`."""
    dim, exists = tier_dims(TIER, True)
    codes, metadata = rows_at(base, slot, TIER, True)
    x = rounded_keys(read_input(key, row, active, dim, exists, key_stride), matrix, active, TIER)
    write_tile(x, codes, metadata, active, TIER, True, DTYPE)
    dim, exists = tier_dims(TIER, False)
    codes, metadata = rows_at(base, slot, TIER, False)
    write_tile(read_input(value, row, active, dim, exists, value_stride), codes, metadata, active, TIER, False, DTYPE)


@triton.jit(do_not_specialize=["rows", "width", "layer_rows", "heads", "model_heads"])
def move_tokens_kernel(
    pages, state, table, key, value, score, position, plan, taken, rows, width, key_stride, value_stride,
    feedback, layer, head, layer_rows, heads, model_heads,
    HIGH: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ONE_TIER: tl.constexpr,
):  # fmt: skip
    """Moves the tokens of BLOCK rows: at most one into each tier, and both if a victim is demoted.

    With ONE_TIER, no token goes to the low tier. The first program also advances the free list past the `taken` pages,
    which no program reads any more. Grid: (cdiv(rows, BLOCK),).

    Args:
        feedback: matrices that keys are rounded by, bfloat16 [model layers, model_heads, key_dim, key_dim], or None.
        layer, head: indices into the matrices (`ModelFeedback`); each layer has `layer_rows` rows of `heads` heads.
    """
    block = tl.program_id(0)
    if block == 0:
        number = tl.load(taken).to(tl.int64)
        tl.store(state, (tl.load(state) + number) % tl.maximum(tl.load(state + 2), 1))
        tl.store(state + 1, tl.load(state + 1) - number)
    row = block * BLOCK + tl.arange(0, BLOCK)
    high_index = tl.load(plan + row, mask=row < rows, other=-1)
    low_index = tl.load(plan + rows + row, mask=row < rows, other=-1)
    if tl.max(tl.maximum(high_index, low_index), 0) >= 0:
        to_high = high_index >= 0
        to_low = low_index >= 0
        demoted = to_high & to_low
        matrix = matrices_of(feedback, layer, head, row, rows, layer_rows, heads, model_heads, HIGH.key_dim)
        high_base, high_slot = token_place(pages, table, row, high_index, width, HIGH, False)
        if not ONE_TIER:
            low_base, low_slot = token_place(pages, table, row, low_index, width, LOW, True)
        if HIGH.score_bytes > 0:
            high_key, high_key_metadata = rows_at(high_base, high_slot, HIGH, True)
            high_value, high_value_metadata = rows_at(high_base, high_slot, HIGH, False)
            downgrade(
                key, row, key_stride, high_key, high_key_metadata, low_base, low_slot, to_low, demoted,
                matrix, HIGH, LOW, True, DTYPE,
            )  # fmt: skip
            downgrade(
                value, row, value_stride, high_value, high_value_metadata, low_base, low_slot, to_low, demoted,
                None, HIGH, LOW, False, DTYPE,
            )  # fmt: skip
            own_score = tl.load(score + row, mask=to_high | to_low, other=0.0)
            own_position = tl.load(position + row, mask=to_high | to_low, other=0).to(tl.int32)
            moved_score = load_scores(high_base + HIGH.score_offset, high_slot, demoted, HIGH.score_bytes)
            moved_position = load_positions(high_base + HIGH.position_offset, high_slot, demoted, HIGH.position_bytes)
            write_scalars(
                low_base, low_slot, tl.where(demoted, moved_score, own_score),
                tl.where(demoted, moved_position, own_position), to_low, LOW,
            )  # fmt: skip
            # all threads have read the victim before any of them overwrites its slot
            tl.debug_barrier()
        elif not ONE_TIER:
            write_candidate(key, value, row, key_stride, value_stride, low_base, low_slot, to_low, matrix, LOW, DTYPE)

        write_candidate(key, value, row, key_stride, value_stride, high_base, high_slot, to_high, matrix, HIGH, DTYPE)
        if HIGH.score_bytes > 0:
            write_scalars(high_base, high_slot, own_score, own_position, to_high, HIGH)
