"""Triton helpers that load packed rows of codes and unpack them in registers.

Rows are packed as in `pages/layout.py`, so one packed tile unpacks into one tile per bit plane, without shuffles. Codes
of several fields unpack into the four quarters of a row, from tiles of each field.

MODE 0 (`PORTABLE`) uses shifts and casts; it serves the interpreter, AMD devices and float32 operands. MODE 1 (`PTX`)
builds fp16 numbers from bits: a code OR-ed into the mantissa of 2^(10 - shift) reads as that power of two plus the
code. Keys keep this bias, which the caller subtracts from the logit (`code_bias`). Values do not, because over
thousands of tokens a biased accumulator would lose more precision than quantisation does. In decode attention, codes of
values are mantissas of subnormal numbers, which have no bias (`code_unit`). Elsewhere the bias is subtracted at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ..pages import layout
from ..precision import CODE_BITS

PORTABLE = 0
PTX = 1
# forms of unpacked codes: with `code_bias` added, exact, or multiplied by `code_unit`
BIASED, EXACT, SUBNORMAL = FORMS = tuple(map(tl.constexpr, range(3)))
BYTES = 0x01010101
HALVES = 0x00010001
# number of tiles from which quarters of a row are unpacked, by the bits of a field
FIELD_WORDS = {4: 2, 2: 1, 1: 2}

# the uncached function, because Triton reads its code
fields = triton.constexpr_function(layout.fields.__wrapped__)


@triton.constexpr_function
def below(bits, index):
    """Returns the total bits of the fields below field `index`."""
    return sum(fields(bits)[:index])


@triton.constexpr_function
def pieces(bits):
    """Returns the number of equal pieces that a row unpacks into: planes of a single field, or quarters for several."""
    return 4 if len(fields(bits)) > 1 else max(1, 8 // bits)


@triton.constexpr_function
def words(bits, count=None):
    """Returns the number of words that `assembly` takes, or the words of the first `count` fields."""
    return sum(FIELD_WORDS[field] for field in fields(bits)[:count]) if len(fields(bits)) > 1 else 1


@triton.constexpr_function
def mantissa_bit(bits, piece):
    """Returns the mantissa bit at which `assembly` leaves the lowest bit of a piece's codes."""
    if len(fields(bits)) == 1:
        return bits * piece
    # two quarters of few bits share a byte; otherwise the last quarters stay where their last field is
    return 4 * (piece // 2) if bits <= 4 else max(0, 2 * piece - below(bits, len(fields(bits)) - 1))


def assembly(bits: int, form: int, chosen: Sequence[int]) -> str:
    """Returns PTX that turns words of four packed bytes into two words of two fp16 for each of the `chosen` pieces.

    Codes of a single field take one word. Codes of several fields take words for each field: for 4 bits, one for the
    even quarters and one for the odd ones; for 2 bits, one; for 1 bit, one for each half of a quarter, with
    zeros in the other half. prmt spreads bytes over 16-bit halves. lop3 with 0xEA is (a & b) | c; with 0xE4 it selects
    a where c is set, otherwise b.
    """
    inputs = [f"${2 * len(chosen) + word}" for word in range(words(bits))]
    lines = [".reg .b32 low, high, bias, bits, upper, joined;"]
    if len(inputs) > 1 and fields(bits)[-1] == 1:
        # the second half of quarter q is plane 2 q + 1
        lines += [f"shr.u32 bits, {inputs[-1]}, 1;", f"or.b32 bits, bits, {inputs[-2]};"]
    outputs = [(f"${2 * output}", f"${2 * output + 1}", piece) for output, piece in enumerate(chosen)]
    for *pair, piece in outputs:
        start = mantissa_bit(bits, piece)
        magic = 0 if form == SUBNORMAL.value else (25 - start) << 10
        source = inputs[0]
        if len(inputs) > 1:
            lines += _join(bits, piece, inputs)
            source = "joined"
        if bits > 4:
            lines += _spread(pair, source, magic >> 8)
        else:
            lines += _spread(("low", "high"), source, 0) + _pick(pair, (1 << bits) - 1 << start, magic)
        if form == EXACT.value:
            lines += [f"mov.b32 bias, {magic * HALVES:#010x};"]
            lines += [f"sub.f16x2 {word}, {word}, bias;" for word in pair]
    return "{\n" + "\n".join(lines) + "\n}"


def _join(bits: int, piece: int, inputs: Sequence[str]) -> list[str]:
    """Returns PTX that joins the fields of a quarter's codes in the register "joined".

    Bits are extracted for two quarters together, so that the assembler merges the instructions. With few bits, both
    codes end up in one byte; otherwise the other quarter's bits land on bits that are replaced.
    """
    start, lines = mantissa_bit(bits, piece), []
    for index, field in enumerate(fields(bits)):
        done = below(bits, index)
        word, place = inputs[words(bits, index)], 2 * piece
        if field == 4:
            word, place = inputs[piece % 2], 4 * (piece // 2)
        elif field == 1:
            word = "bits"
        left = start + done - place
        shift = f"shl.b32 %s, %s, {left};" if left > 0 else f"shr.u32 %s, %s, {-left};"
        if index == 0:
            lines += [shift % ("joined", word)]
            continue
        kept = ((1 << done) - 1) * (0x11 if bits <= 4 else 1 << start)
        if bits > 4:
            lines += [f"and.b32 upper, {word}, {(((1 << field) - 1) * 0x11 << 2 * (piece % 2)) * BYTES:#010x};"]
            word = "upper"
        lines += [shift % ("upper", word), f"lop3.b32 joined, joined, upper, {kept * BYTES:#010x}, 0xE4;"]
    return lines


def _spread(words: Sequence[str], source: str, upper_byte: int) -> list[str]:
    """Returns PTX that spreads bytes 0 and 1 over the halves of the first word, 2 and 3 over those of the second."""
    selectors = ("0x4140", "0x4342")
    return [f"prmt.b32 {word}, {source}, {upper_byte * BYTES:#010x}, {s};" for word, s in zip(words, selectors)]


def _pick(words: Sequence[str], mask: int, magic: int) -> list[str]:
    """Returns PTX that combines the masked bits of both halves of "low" and "high" with the bits of a power of two."""
    operands = f"{mask * HALVES:#010x}, {magic * HALVES:#010x}, 0xEA;"
    return [f"lop3.b32 {word}, {source}, {operands}" for word, source in zip(words, ("low", "high"))]


@triton.constexpr_function
def constraints(bits, count):
    """Returns the register constraints of `assembly` for `count` pieces.

    Only the last output may share an input's register.
    """
    return "=&r," * (2 * count - 1) + "=r" + ",r" * words(bits)


# constants, which are part of Triton's cache key
_ALONE = tl.constexpr(
    [
        {bits: [assembly(bits, form, (i,)) for i in range(pieces(bits))] for bits in CODE_BITS}
        for form in range(len(FORMS))
    ]
)
_TOGETHER = tl.constexpr(
    [{bits: assembly(bits, form, range(pieces(bits))) for bits in CODE_BITS} for form in range(len(FORMS))]
)


@triton.constexpr_function
def piece_assembly(bits, piece, form):
    return _ALONE[form][bits][piece]


@triton.constexpr_function
def joint_assembly(bits, form):
    return _TOGETHER[form][bits]


@triton.constexpr_function
def half_types(count):
    return (tl.float16,) * count


@triton.constexpr_function
def code_bias(bits, piece, mode):
    """Returns the bias that `BIASED` unpacking adds to every code of a piece."""
    return 0.0 if mode == 0 else 1024.0 / 2 ** mantissa_bit(bits, piece)


@triton.constexpr_function
def code_unit(bits, piece, mode):
    """Returns the number, a power of two, that `SUBNORMAL` unpacking turns a piece's code of 1 into."""
    return 1.0 if mode == 0 else 2.0 ** (mantissa_bit(bits, piece) - 24)


@triton.jit
def unpack(packed, BITS: tl.constexpr, FORM: tl.constexpr, HERE: tl.constexpr, MODE: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """Unpacks a row into a tuple of pieces, as DTYPE, or as fp16 in PTX mode.

    PTX mode needs tiles of a multiple of 4 bytes. Without HERE, every piece has its own assembly, because Triton 3.8
    gives only one result of an assembly the layout of a matrix operand; the assembler merges the common instructions.
    With HERE, the assembly is declared impure, which keeps Triton from moving the layout change.

    Args:
        packed: tuple of uint8 [tokens, lanes], one for each word that `assembly` takes.
        FORM: `BIASED`, `EXACT` or `SUBNORMAL`; they differ only in PTX mode.
        HERE: whether to unpack in the layout of the loaded tiles, so that unpacked codes may change threads. Otherwise
            Triton moves the layout change ahead of unpacking, and every thread unpacks the codes that it multiplies.
            That pays off if these are four or more consecutive bytes.
    """
    COUNT: tl.constexpr = pieces(BITS)
    if MODE == 0:
        codes = ()
        for piece in tl.static_range(COUNT):
            codes = codes + (portable_piece(packed, piece, BITS).to(DTYPE),)
        return codes
    elif not HERE:
        codes = ()
        for piece in tl.static_range(COUNT):
            code = tl.inline_asm_elementwise(
                piece_assembly(BITS, piece, FORM), constraints(BITS, 1), packed, dtype=tl.float16, is_pure=True, pack=4
            )
            codes = codes + (code,)
        return codes
    else:
        return tl.inline_asm_elementwise(
            joint_assembly(BITS, FORM), constraints(BITS, COUNT), packed, dtype=half_types(COUNT), is_pure=False, pack=4
        )


@triton.jit
def portable_piece(packed, PIECE: tl.constexpr, BITS: tl.constexpr):
    """Returns the codes of one piece as uint8."""
    COUNT: tl.constexpr = len(fields(BITS))
    if COUNT == 1:
        code = packed[0] >> (BITS * PIECE) if PIECE > 0 else packed[0]
        return code & ((1 << BITS) - 1) if PIECE < pieces(BITS) - 1 else code
    else:
        code = portable_field(packed, PIECE, fields(BITS)[0], 0)
        for index in tl.static_range(1, COUNT):
            code |= portable_field(packed, PIECE, fields(BITS)[index], words(BITS, index)) << below(BITS, index)
        return code


@triton.jit
def portable_field(packed, PIECE: tl.constexpr, FIELD: tl.constexpr, FIRST: tl.constexpr):
    """Returns one field of a quarter's codes, which is packed in the words starting at FIRST."""
    if FIELD == 4:
        field = packed[FIRST + PIECE % 2] >> (PIECE // 2 * 4)
    else:
        field = packed[FIRST] >> (PIECE * 2)
        if FIELD == 1:
            field = field | packed[FIRST + 1] >> (PIECE * 2 + 1)
    return field & ((1 << FIELD) - 1)


@triton.jit
def load_lanes(pointer, lane, exists, FULL: tl.constexpr, EVICT: tl.constexpr):
    """Loads the elements `lane` of rows at pointers [tokens] as a tile [tokens, lanes], zero if they do not exist.

    Args:
        FULL: whether all elements exist; loads without a mask are wider.
        EVICT: eviction policy, "evict_first" for data that is read once, otherwise "".
    """
    if FULL:
        return tl.load(pointer[:, None] + lane[None, :], eviction_policy=EVICT)
    else:
        return tl.load(pointer[:, None] + lane[None, :], mask=exists[None, :], other=0, eviction_policy=EVICT)


@triton.jit
def load_runs(rows, RUNS: tl.constexpr, SIZE: tl.constexpr, lane, exists, FULL: tl.constexpr, EVICT: tl.constexpr):
    """Loads 1, 2 or 4 neighbouring runs of SIZE bytes of each row as a tuple of tiles [tokens, lanes].

    Full runs of 32 bytes, the size of an L2 sector, take a single load, because two loads would read the same sectors
    if rows are not aligned. Shorter runs would change threads. Other arguments are as in `load_lanes`.
    """
    if FULL and SIZE == 32:
        return halves(load_lanes(rows, tl.arange(0, RUNS * SIZE), None, True, EVICT), RUNS)
    else:
        tiles = ()
        for run in tl.static_range(RUNS):
            tiles = tiles + (load_lanes(rows + run * SIZE, lane, exists, FULL, EVICT),)
        return tiles


@triton.jit
def halves(tile, COUNT: tl.constexpr):
    """Splits a tile [tokens, lanes] along its lanes into COUNT equal tiles; COUNT is a power of two."""
    if COUNT == 1:
        return (tile,)
    else:
        pairs = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1)
        first, second = tl.split(pairs)
        return halves(first, COUNT // 2) + halves(second, COUNT // 2)


@triton.jit
def load_codes(rows, lane, exists, FULL: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, FORM: tl.constexpr,
               HERE: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """Loads codes of packed rows of DIM elements as a tuple of [tokens, lanes], one for each of the `pieces`.

    Other arguments are as in `unpack` and `load_lanes`.

    Args:
        rows: uint8 pointers [tokens].
        lane: index of each element within its piece.
        exists: True for elements that exist.
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
    """Loads the tiles from which `assembly` unpacks one field of codes of several fields."""
    if BITS == 1:
        # one-bit planes are halves of quarters: each half is loaded into its own tile, with zeros in the other half
        HALF: tl.constexpr = DIM // 8
        first = load_lanes(rows, lane, lane < HALF, False, EVICT)
        return (first, load_lanes(rows - HALF, lane, exists & (lane >= HALF), False, EVICT))
    elif BITS == 4:
        return load_runs(rows, 2, DIM // 4, lane, exists, FULL, EVICT)
    else:
        return (load_lanes(rows, lane, exists, FULL, EVICT),)


@triton.jit
def gather_codes(rows, element, mask, BITS: tl.constexpr, DIM: tl.constexpr):
    """Loads codes of arbitrary elements of packed rows of DIM elements, as int32.

    Args:
        rows: uint8 pointers, broadcastable with `element`.
        element: index of each element, int of any shape.
        mask: True for elements to load, broadcastable with `element`; None loads all.
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
    """Concatenates COUNT tiles [tokens, lanes] of a tuple, starting at FIRST, into [tokens, COUNT * lanes]."""
    if COUNT == 1:
        return tiles[FIRST]
    else:
        left = stack_pieces(tiles, FIRST, COUNT // 2)
        right = stack_pieces(tiles, FIRST + COUNT // 2, COUNT // 2)
        return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])
