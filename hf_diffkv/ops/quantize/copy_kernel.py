"""The Triton kernel that moves tokens between slots as they are stored, code for code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def word(row_bytes):
    """The widest integers that rows of so many bytes consist of."""
    return tl.uint32 if row_bytes % 4 == 0 else tl.uint16 if row_bytes % 2 == 0 else tl.uint8


@triton.constexpr_function
def words(row_bytes):
    return row_bytes // (4 if row_bytes % 4 == 0 else 2 if row_bytes % 2 == 0 else 1)


@triton.constexpr_function
def lanes(row_bytes):
    return triton.next_power_of_2(words(row_bytes))


@triton.jit
def copy_rows(source, target, from_slot, to_slot, active, OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Copies one segment's rows between pages (pointers [tokens]); segments start at multiples of 16 bytes."""
    COUNT: tl.constexpr = words(ROW_BYTES)
    lane = tl.arange(0, lanes(ROW_BYTES))[None, :]
    mask = active[:, None] & (lane < COUNT)
    source = (source + OFFSET).to(tl.pointer_type(word(ROW_BYTES)))
    target = (target + OFFSET).to(tl.pointer_type(word(ROW_BYTES)))
    row = tl.load(source[:, None] + (from_slot[:, None] * COUNT + lane), mask=mask)
    tl.store(target[:, None] + (to_slot[:, None] * COUNT + lane), row, mask=mask)


@triton.jit(do_not_specialize=["count"])
def copy_tokens_kernel(
    pages, from_page, from_slot, to_page, to_slot, count, TIER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copies BLOCK tokens with their metadata, scores and positions. Grid: (cdiv(count, BLOCK),)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    active = token < count
    source = pages + tl.load(from_page + token, mask=active, other=0).to(tl.int64) * TIER.page_bytes
    target = pages + tl.load(to_page + token, mask=active, other=0).to(tl.int64) * TIER.page_bytes
    old = tl.load(from_slot + token, mask=active, other=0).to(tl.int32)
    new = tl.load(to_slot + token, mask=active, other=0).to(tl.int32)
    copy_rows(source, target, old, new, active, TIER.key_offset, TIER.key_row)
    copy_rows(source, target, old, new, active, TIER.value_offset, TIER.value_row)
    if TIER.k_bits < 16:
        copy_rows(source, target, old, new, active, TIER.key_metadata_offset, TIER.key_metadata * TIER.k_groups)
    if TIER.v_bits < 16:
        copy_rows(source, target, old, new, active, TIER.value_metadata_offset, TIER.value_metadata * TIER.v_groups)
    if TIER.score_bytes > 0:
        copy_rows(source, target, old, new, active, TIER.score_offset, TIER.score_bytes)
        copy_rows(source, target, old, new, active, TIER.position_offset, TIER.position_bytes)
