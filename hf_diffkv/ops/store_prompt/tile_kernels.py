"""Triton functions that store a tile of a row's exact tokens: in the pages of a tier, or in the window.

Tiles are [tokens, planes, bytes of a plane], as in `quantize/kernels.py`.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..quantize.kernels import padded_width, rows_at, stored_bits, tier_dims, write_scalars, write_tile
from ..rotation_kernel import rotated_tile, rounded
from ..rounding.kernels import MOST_BITS, round_for_tier

# where tokens of a tile go in pages: which of them (bool), page numbers (int64) and slots of a page, [tokens] each
Target = namedtuple("Target", "active page slot")
# where they go in windows: [rows * slots, dim] and [rows * slots], then slots among all (int64), which tokens (bool),
# and a flag that is set if a token cannot be stored, uint8 [1]
WindowSlots = namedtuple("WindowSlots", "key value score slot stays invalid")
# pointers to new tokens, [tokens], contiguous rotations, the offset to subtract from keys, float32 [rows, key_dim],
# matrices that keys are rounded by (ops/rounding), float32 [rows, key_dim, key_dim], pointers to the codes of keys,
# [tokens], that replace these matrices, and the largest magnitude of an element or, with a rotation, the largest norm
# of a token; all but the pointers to tokens and the limit may be None
Incoming = namedtuple("Incoming", "key value key_matrix value_matrix offset feedback codes limit")


@triton.jit
def new_tile(rows, active, matrix, limit, ROOT: tl.constexpr, TIER: tl.constexpr, IS_KEY: tl.constexpr,
             INNER: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Loads and rotates tokens; returns a float32 tile and whether each token can be stored.

    Arguments are as in `rotated_tile` and `Incoming`.
    """
    if matrix is None:
        dim, exists = tier_dims(TIER, IS_KEY)
        x = tl.load(rows[:, None, None] + dim, mask=active[:, None, None] & exists, other=0.0).to(tl.float32)
        # NaN fails the comparison
        wrong = exists & ~(tl.abs(x) <= limit)
        good = tl.sum(tl.sum(wrong.to(tl.int32), 2), 1) == 0
    else:
        DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
        BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
        WIDTH: tl.constexpr = padded_width(DIM, BITS)
        x, squares = rotated_tile(rows, active, matrix, DIM, 1, ROOT, DIM, BITS, WIDTH, INNER, OPERAND)
        # the square of a large limit is infinite, as is that of an infinite element
        good = (squares <= limit * limit) & (squares < float("inf"))
    return x, good


@triton.jit
def less(x, offset, row, TIER: tl.constexpr):
    """Subtracts a row's offset, float32 [rows, key_dim], from a tile of its keys."""
    dim, exists = tier_dims(TIER, True)
    return x - tl.load(offset + row.to(tl.int64) * TIER.key_dim + dim, mask=exists, other=0.0)


@triton.jit
def store_tile(x, pages, to, feedback, row, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr,
               chosen=None):  # fmt: skip
    """Quantises a tile into pages.

    Keys of few bits get the codes at `chosen` (pointers [tokens]), or are rounded by the row's matrix if one is given.
    """
    if IS_KEY and chosen is None and feedback is not None and TIER.k_bits <= MOST_BITS:
        x = round_for_tier(x, feedback + row.to(tl.int64) * (TIER.key_dim * TIER.key_dim), TIER)
    codes, metadata = rows_at(pages + to.page * TIER.page_bytes, to.slot, TIER, IS_KEY)
    if IS_KEY and chosen is not None and TIER.k_bits <= MOST_BITS:
        dim, exists = tier_dims(TIER, True)
        found = tl.load(chosen[:, None, None] + dim, mask=to.active[:, None, None] & exists, other=0)
        write_tile(x, codes, metadata, to.active, TIER, IS_KEY, DTYPE, found)
    else:
        write_tile(x, codes, metadata, to.active, TIER, IS_KEY, DTYPE)


@triton.jit
def store_scalars(pages, to, score, position, TIER: tl.constexpr):
    """Writes scores and positions to pages that have them."""
    if TIER.score_bytes > 0:
        write_scalars(pages + to.page * TIER.page_bytes, to.slot, score, position, to.active, TIER)


@triton.jit
def load_window(window, slot, active, TIER: tl.constexpr, IS_KEY: tl.constexpr):
    """Loads a tile of the windows, [rows * slots, DIM]."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    dim, exists = tier_dims(TIER, IS_KEY)
    mask = active[:, None, None] & exists
    return tl.load(window + slot[:, None, None] * DIM + dim, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def keep_tile(x, window, slot, stays, TIER: tl.constexpr, IS_KEY: tl.constexpr, DTYPE: tl.constexpr):
    """Writes a tile to the windows, [rows * slots, DIM]."""
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    dim, exists = tier_dims(TIER, IS_KEY)
    bits = stored_bits(x, DTYPE)
    pointer = window.to(tl.pointer_type(bits.dtype)) + slot[:, None, None] * DIM + dim
    tl.store(pointer, bits, mask=stays[:, None, None] & exists)


@triton.jit
def enter_tile(pages, to, new, exact, active, score, position, row, TIER: tl.constexpr, KEY_ROOT: tl.constexpr,
               VALUE_ROOT: tl.constexpr, INNER: tl.constexpr, DTYPE: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Stores a tile of a row's new tokens in one tier and in the window.

    Args:
        to, new: `Target` and `Incoming`.
        exact: `WindowSlots`; None writes only to pages.
        active: tokens to read, bool [tokens].
        score, position: float32 and int64 [tokens].
    """
    x, good = new_tile(new.key, active, new.key_matrix, new.limit, KEY_ROOT, TIER, True, INNER, OPERAND)
    if new.offset is not None:
        x = less(x, new.offset, row, TIER)
    x = rounded(x, DTYPE)
    if exact is not None:
        keep_tile(x, exact.key, exact.slot, exact.stays, TIER, True, DTYPE)
    store_tile(x, pages, to, new.feedback, row, TIER, True, DTYPE, new.codes)
    x, fine = new_tile(new.value, active, new.value_matrix, new.limit, VALUE_ROOT, TIER, False, INNER, OPERAND)
    x = rounded(x, DTYPE)
    if exact is not None:
        keep_tile(x, exact.value, exact.slot, exact.stays, TIER, False, DTYPE)
        tl.store(exact.score + exact.slot, score, mask=exact.stays)
        wrong = tl.sum((active & ~(good & fine)).to(tl.int32), 0)
        tl.store(exact.invalid, 1, mask=wrong > 0)
    store_tile(x, pages, to, None, row, TIER, False, DTYPE)
    store_scalars(pages, to, score, position, TIER)


@triton.jit
def leave_tile(pages, to, window_key, window_value, window_score, slot, token, there, stays, shift, feedback, row,
               TIER: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Stores tokens of a tile of a row's window in one tier, and shifts keys that stay in the window.

    Args:
        to: `Target`.
        slot: slots among those of all windows, int64 [tokens].
        token, there: results of `token_in_slot`.
        stays: tokens whose shifted keys are written, bool [tokens]; None writes none.
        shift: offset to subtract from all keys that were in the window, float32 [rows, key_dim], or None.
        feedback: field of `Incoming`.
    """
    x = load_window(window_key, slot, there, TIER, True)
    if shift is not None:
        x = rounded(less(x, shift, row, TIER), DTYPE)
        if stays is not None:
            # only this program reads its tokens, and it has read them all before it writes those that stay
            tl.debug_barrier()
            keep_tile(x, window_key, slot, stays, TIER, True, DTYPE)
    store_tile(x, pages, to, feedback, row, TIER, True, DTYPE)
    x = load_window(window_value, slot, to.active, TIER, False)
    store_tile(x, pages, to, None, row, TIER, False, DTYPE)
    if TIER.score_bytes > 0:
        score = tl.load(window_score + slot, mask=to.active, other=0.0)
        store_scalars(pages, to, score, token, TIER)
