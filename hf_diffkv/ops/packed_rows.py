"""Loading packed rows of codes in the tiles that `dequant.py` unpacks (Triton helpers)."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import below, fields, unpack


@triton.jit
def load_lanes(pointer, lane, exists, FULL: tl.constexpr, EVICT: tl.constexpr = ""):
    """Rows at pointers [tokens] as a tile [tokens, lanes] of the elements `lane`, zeros where one does not exist.

    FULL: all exist; loads without a mask are wider. EVICT: when the cache of the device may forget them,
    "evict_first" for what is read once.
    """
    if FULL:
        return tl.load(pointer[:, None] + lane[None, :], eviction_policy=EVICT)
    else:
        return tl.load(pointer[:, None] + lane[None, :], mask=exists[None, :], other=0, eviction_policy=EVICT)


@triton.jit
def load_codes(rows, lane, exists, FULL: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, FORM: tl.constexpr,
               HERE: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr, EVICT: tl.constexpr = ""):  # fmt: skip
    """Codes of packed rows of DIM elements, a tuple of [tokens, lanes] for the `pieces`; see `unpack`, `load_lanes`.

    Args:
        rows: uint8 pointers [tokens]. lane, exists: which elements of each piece, and whether they exist.
    """
    COUNT: tl.constexpr = len(fields(BITS))
    if COUNT == 1:
        packed = (load_lanes(rows, lane, exists, FULL, EVICT),)
    else:
        packed = ()
        for index in tl.static_range(COUNT):
            field = rows + DIM * below(BITS, index) // 8
            packed = packed + load_field(field, lane, exists, FULL, fields(BITS)[index], DIM, EVICT)
    return unpack(packed, BITS, FORM, HERE, MODE, DTYPE)


@triton.jit
def load_field(rows, lane, exists, FULL: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, EVICT: tl.constexpr):
    """What the quarters of a field of codes of several are unpacked from, see `assembly`."""
    if BITS == 1:
        # the planes of one bit are halves of quarters: each half in a tile of its own, with zeros in the other
        HALF: tl.constexpr = DIM // 8
        first = load_lanes(rows, lane, lane < HALF, False, EVICT)
        return (first, load_lanes(rows - HALF, lane, exists & (lane >= HALF), False, EVICT))
    elif BITS == 4:
        first = load_lanes(rows, lane, exists, FULL, EVICT)
        return (first, load_lanes(rows + DIM // 4, lane, exists, FULL, EVICT))
    else:
        return (load_lanes(rows, lane, exists, FULL, EVICT),)


@triton.jit
def gather_codes(rows, element, mask, BITS: tl.constexpr, DIM: tl.constexpr):
    """Codes of any elements (int, any shape) of packed rows of DIM elements as int32.

    Args:
        rows: uint8 pointers that broadcast with `element`, as `mask` does, which may be None.
    """
    codes = gather_field(rows, element, mask, fields(BITS)[0], DIM)
    for index in tl.static_range(1, len(fields(BITS))):
        field = rows + DIM * below(BITS, index) // 8
        codes |= gather_field(field, element, mask, fields(BITS)[index], DIM) << below(BITS, index)
    return codes


@triton.jit
def gather_field(rows, element, mask, BITS: tl.constexpr, DIM: tl.constexpr):
    ROW: tl.constexpr = DIM * BITS // 8
    if mask is None:
        packed = tl.load(rows + element % ROW)
    else:
        packed = tl.load(rows + element % ROW, mask=mask, other=0)
    return (packed.to(tl.int32) >> (element // ROW * BITS)) & ((1 << BITS) - 1)


@triton.jit
def stack_pieces(tiles, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles [tokens, lanes] of a tuple one behind the other: [tokens, COUNT * lanes]."""
    if COUNT == 1:
        return tiles[FIRST]
    else:
        left = stack_pieces(tiles, FIRST, COUNT // 2)
        right = stack_pieces(tiles, FIRST + COUNT // 2, COUNT // 2)
        return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])
