"""Tiles of stored keys or values, dequantised in registers (Triton helpers).

The pieces of unpacked rows (`ops/dequant.py`) lie one behind the other in a tile, each padded, so nothing is shuffled.
To give every tile of a row the same order of columns, whatever its bits, rows are cut into PARTS equal parts, as many
as the level of most pieces has, and each part is padded to WIDTH / PARTS columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dequant import EXACT, load_codes, load_lanes, pieces, stack_pieces
from ..narrow_kernel import load_metadata
from ..quantize.kernels import rows_at


@triton.jit
def row_columns(DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Element of a row of DIM that each of WIDTH columns holds, and whether it holds one."""
    column = tl.arange(0, WIDTH)
    if DIM == WIDTH:
        return column, column < DIM
    else:
        lane = column % (WIDTH // PARTS)
        return column // (WIDTH // PARTS) * (DIM // PARTS) + lane, lane < DIM // PARTS


@triton.jit
def as_operand(x, DOT: tl.constexpr):
    """`x` in the dtype of the dots; the way from bf16 is through float32, the only one the interpreter gets right."""
    if x.dtype != DOT:
        x = x.to(tl.float32).to(DOT)
    return x


@triton.jit
def load_columns(pointer, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Rows of DIM elements at pointers [tokens] as a tile [tokens, WIDTH], zeros where a column holds nothing."""
    element, exists = row_columns(DIM, WIDTH, PARTS)
    return load_lanes(pointer, element, exists, DIM == WIDTH)


@triton.jit
def decode(codes, scale, zero, DOT: tl.constexpr, MODE: tl.constexpr):
    """codes * scale + zero, rounded once."""
    if MODE == 0:
        return (codes * scale + zero).to(DOT)
    else:
        scale, zero = scale.to(tl.float16), zero.to(tl.float16)
        return as_operand(tl.fma(codes, tl.broadcast_to(scale, codes.shape), tl.broadcast_to(zero, codes.shape)), DOT)


@triton.jit
def stored_tile(rows, metadata, SIZE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
                WIDTH: tl.constexpr, PARTS: tl.constexpr, ELEMENT: tl.constexpr, DOT: tl.constexpr,
                MODE: tl.constexpr):  # fmt: skip
    """Keys or values of a page's tokens in DOT, [tokens, WIDTH].

    Args:
        rows, metadata: uint8 pointers [tokens].
        SIZE: bytes of the metadata of a group. ELEMENT: what 16-bit rows hold. MODE: as in `ops/dequant.py`.
    """
    if BITS == 16:
        return as_operand(load_columns(rows.to(tl.pointer_type(ELEMENT)), DIM, WIDTH, PARTS), DOT)
    else:
        PIECES: tl.constexpr = pieces(BITS)
        PIECE: tl.constexpr = DIM // PIECES
        lane, exists = row_columns(PIECE, WIDTH // PIECES, PARTS // PIECES)
        codes = load_codes(rows, lane, exists, PIECE == WIDTH // PIECES, BITS, DIM, EXACT, True, MODE, tl.float32)
        tiles = ()
        if PIECES % GROUPS == 0:
            for group in tl.static_range(GROUPS):
                scale, zero = load_metadata(metadata + SIZE * group, SIZE, BITS)
                for piece in tl.static_range(group * PIECES // GROUPS, (group + 1) * PIECES // GROUPS):
                    tiles = tiles + (decode(codes[piece], scale[:, None], zero[:, None], DOT, MODE),)
        else:
            for piece in tl.static_range(PIECES):
                group = tl.where(exists, (piece * PIECE + lane) // (DIM // GROUPS), 0)
                scale, zero = load_metadata(metadata[:, None] + SIZE * group[None, :], SIZE, BITS)
                tiles = tiles + (decode(codes[piece], scale, zero, DOT, MODE),)
        return stack_pieces(tiles, 0, PIECES)


@triton.jit
def page_rows(pages, table, token, DIRECTION: tl.constexpr, TIER: tl.constexpr):
    """Pages (pointers [tokens]) and slots of a row's tokens; `table` points at the level's first entry."""
    page = tl.load(table + DIRECTION * (token // TIER.capacity))
    return page_base(pages, page, TIER), token % TIER.capacity


@triton.jit
def page_base(pages, page, TIER: tl.constexpr):
    return pages + page.to(tl.int64) * TIER.page_bytes


@triton.jit
def tier_tile(base, slot, TIER: tl.constexpr, IS_KEY: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
              ELEMENT: tl.constexpr, DOT: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """`stored_tile` of keys or values of the tokens in slots of the pages at `base`."""
    SIZE: tl.constexpr = TIER.key_metadata if IS_KEY else TIER.value_metadata
    BITS: tl.constexpr = TIER.k_bits if IS_KEY else TIER.v_bits
    GROUPS: tl.constexpr = TIER.k_groups if IS_KEY else TIER.v_groups
    DIM: tl.constexpr = TIER.key_dim if IS_KEY else TIER.value_dim
    rows, metadata = rows_at(base, slot, TIER, IS_KEY)
    return stored_tile(rows, metadata, SIZE, BITS, GROUPS, DIM, WIDTH, PARTS, ELEMENT, DOT, MODE)
