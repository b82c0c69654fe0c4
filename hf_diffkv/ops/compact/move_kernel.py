"""The Triton kernel that carries out a compaction plan; see `kernels` for the launches before it."""

from __future__ import annotations

import triton
import triton.language as tl

from ..narrow_kernel import load_positions, load_scores
from ..quantize.kernels import read_input, read_rows, tile_dims, write_rows, write_scalars
from .kernels import column


@triton.jit
def token_place(table, row, index, width, LOW: tl.constexpr, CAPACITY: tl.constexpr):
    """Page id (int64) and slot of each row's `index`-th token; page 0 where the index is -1."""
    position = tl.maximum(index, 0)
    entry = column(position // CAPACITY, width, LOW)
    page = tl.load(table + row.to(tl.int64) * width + entry, mask=index >= 0, other=0)
    return page.to(tl.int64), position % CAPACITY


@triton.jit
def downgrade(
    rows,
    row,
    stride,
    high_codes,
    high_metadata,
    codes,
    metadata,
    active,
    demoted,
    DIM: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HIGH_GROUPS: tl.constexpr,
    HIGH_METADATA: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    METADATA: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes a key or value to the low tier: read from its high slot where `demoted`, from the window elsewhere."""
    dim, exists = tile_dims(DIM, BITS, WIDTH)
    stored = read_rows(
        high_codes,
        high_metadata,
        demoted,
        dim,
        exists,
        DIM=DIM,
        BITS=HIGH_BITS,
        GROUPS=HIGH_GROUPS,
        METADATA=HIGH_METADATA,
        DTYPE=DTYPE,
    )
    fresh = read_input(rows, row, active & (demoted == 0), dim, exists, stride)
    x = tl.where(demoted[:, None, None], stored, fresh)
    write_rows(
        x, dim, exists, codes, metadata, active, DIM=DIM, BITS=BITS, GROUPS=GROUPS, METADATA=METADATA, WIDTH=WIDTH,
        DTYPE=DTYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "width"])
def move_tokens_kernel(
    pages,
    state,
    table,
    key,
    value,
    score,
    position,
    plan,
    taken,
    rows,
    width,
    key_stride,
    value_stride,
    PAGE_BYTES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HIGH_CAPACITY: tl.constexpr,
    HIGH_K_BITS: tl.constexpr,
    HIGH_V_BITS: tl.constexpr,
    HIGH_K_GROUPS: tl.constexpr,
    HIGH_V_GROUPS: tl.constexpr,
    HIGH_KEY_ROW: tl.constexpr,
    HIGH_VALUE_ROW: tl.constexpr,
    HIGH_KEY_METADATA: tl.constexpr,
    HIGH_VALUE_METADATA: tl.constexpr,
    HIGH_KEY_OFFSET: tl.constexpr,
    HIGH_KEY_METADATA_OFFSET: tl.constexpr,
    HIGH_VALUE_OFFSET: tl.constexpr,
    HIGH_VALUE_METADATA_OFFSET: tl.constexpr,
    HIGH_SCORE_OFFSET: tl.constexpr,
    HIGH_POSITION_OFFSET: tl.constexpr,
    HIGH_SCORE_BYTES: tl.constexpr,
    HIGH_POSITION_BYTES: tl.constexpr,
    HIGH_KEY_WIDTH: tl.constexpr,
    HIGH_VALUE_WIDTH: tl.constexpr,
    LOW_CAPACITY: tl.constexpr,
    LOW_K_BITS: tl.constexpr,
    LOW_V_BITS: tl.constexpr,
    LOW_K_GROUPS: tl.constexpr,
    LOW_V_GROUPS: tl.constexpr,
    LOW_KEY_ROW: tl.constexpr,
    LOW_VALUE_ROW: tl.constexpr,
    LOW_KEY_METADATA: tl.constexpr,
    LOW_VALUE_METADATA: tl.constexpr,
    LOW_KEY_OFFSET: tl.constexpr,
    LOW_KEY_METADATA_OFFSET: tl.constexpr,
    LOW_VALUE_OFFSET: tl.constexpr,
    LOW_VALUE_METADATA_OFFSET: tl.constexpr,
    LOW_SCORE_OFFSET: tl.constexpr,
    LOW_POSITION_OFFSET: tl.constexpr,
    LOW_SCORE_BYTES: tl.constexpr,
    LOW_POSITION_BYTES: tl.constexpr,
    LOW_KEY_WIDTH: tl.constexpr,
    LOW_VALUE_WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves the tokens of BLOCK rows: one into each tier at most, both when a victim is demoted. Where pages have no
    scores, none goes to the low tier.

    The first program also advances the free list past the `taken` pages, which nobody reads any more by now.
    Grid: (cdiv(rows, BLOCK),).
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
        page, high_slot = token_place(table, row, high_index, width, False, HIGH_CAPACITY)
        high_base = pages + page * PAGE_BYTES
        high_key = high_base + HIGH_KEY_OFFSET + high_slot * HIGH_KEY_ROW
        high_key_metadata = high_base + HIGH_KEY_METADATA_OFFSET + high_slot * (HIGH_KEY_METADATA * HIGH_K_GROUPS)
        high_value = high_base + HIGH_VALUE_OFFSET + high_slot * HIGH_VALUE_ROW
        high_value_metadata = high_base + HIGH_VALUE_METADATA_OFFSET + high_slot * (HIGH_VALUE_METADATA * HIGH_V_GROUPS)

        if HIGH_SCORE_BYTES > 0:
            page, low_slot = token_place(table, row, low_index, width, True, LOW_CAPACITY)
            low_base = pages + page * PAGE_BYTES
            downgrade(
                key,
                row,
                key_stride,
                high_key,
                high_key_metadata,
                low_base + LOW_KEY_OFFSET + low_slot * LOW_KEY_ROW,
                low_base + LOW_KEY_METADATA_OFFSET + low_slot * (LOW_KEY_METADATA * LOW_K_GROUPS),
                to_low,
                demoted,
                DIM=KEY_DIM,
                HIGH_BITS=HIGH_K_BITS,
                HIGH_GROUPS=HIGH_K_GROUPS,
                HIGH_METADATA=HIGH_KEY_METADATA,
                BITS=LOW_K_BITS,
                GROUPS=LOW_K_GROUPS,
                METADATA=LOW_KEY_METADATA,
                WIDTH=LOW_KEY_WIDTH,
                DTYPE=DTYPE,
            )
            downgrade(
                value,
                row,
                value_stride,
                high_value,
                high_value_metadata,
                low_base + LOW_VALUE_OFFSET + low_slot * LOW_VALUE_ROW,
                low_base + LOW_VALUE_METADATA_OFFSET + low_slot * (LOW_VALUE_METADATA * LOW_V_GROUPS),
                to_low,
                demoted,
                DIM=VALUE_DIM,
                HIGH_BITS=HIGH_V_BITS,
                HIGH_GROUPS=HIGH_V_GROUPS,
                HIGH_METADATA=HIGH_VALUE_METADATA,
                BITS=LOW_V_BITS,
                GROUPS=LOW_V_GROUPS,
                METADATA=LOW_VALUE_METADATA,
                WIDTH=LOW_VALUE_WIDTH,
                DTYPE=DTYPE,
            )
            own_score = tl.load(score + row, mask=to_high | to_low, other=0.0)
            own_position = tl.load(position + row, mask=to_high | to_low, other=0).to(tl.int32)
            moved_score = load_scores(high_base + HIGH_SCORE_OFFSET, high_slot, demoted, HIGH_SCORE_BYTES)
            moved_position = load_positions(high_base + HIGH_POSITION_OFFSET, high_slot, demoted, HIGH_POSITION_BYTES)
            write_scalars(
                low_base,
                low_slot,
                tl.where(demoted, moved_score, own_score),
                tl.where(demoted, moved_position, own_position),
                to_low,
                SCORE_OFFSET=LOW_SCORE_OFFSET,
                POSITION_OFFSET=LOW_POSITION_OFFSET,
                SCORE_BYTES=LOW_SCORE_BYTES,
                POSITION_BYTES=LOW_POSITION_BYTES,
            )
            # the victim has been read by all threads before any overwrites its slot
            tl.debug_barrier()

        dim, exists = tile_dims(KEY_DIM, HIGH_K_BITS, HIGH_KEY_WIDTH)
        write_rows(
            read_input(key, row, to_high, dim, exists, key_stride),
            dim,
            exists,
            high_key,
            high_key_metadata,
            to_high,
            DIM=KEY_DIM,
            BITS=HIGH_K_BITS,
            GROUPS=HIGH_K_GROUPS,
            METADATA=HIGH_KEY_METADATA,
            WIDTH=HIGH_KEY_WIDTH,
            DTYPE=DTYPE,
        )
        dim, exists = tile_dims(VALUE_DIM, HIGH_V_BITS, HIGH_VALUE_WIDTH)
        write_rows(
            read_input(value, row, to_high, dim, exists, value_stride),
            dim,
            exists,
            high_value,
            high_value_metadata,
            to_high,
            DIM=VALUE_DIM,
            BITS=HIGH_V_BITS,
            GROUPS=HIGH_V_GROUPS,
            METADATA=HIGH_VALUE_METADATA,
            WIDTH=HIGH_VALUE_WIDTH,
            DTYPE=DTYPE,
        )
        if HIGH_SCORE_BYTES > 0:
            write_scalars(
                high_base,
                high_slot,
                own_score,
                own_position,
                to_high,
                SCORE_OFFSET=HIGH_SCORE_OFFSET,
                POSITION_OFFSET=HIGH_POSITION_OFFSET,
                SCORE_BYTES=HIGH_SCORE_BYTES,
                POSITION_BYTES=HIGH_POSITION_BYTES,
            )
