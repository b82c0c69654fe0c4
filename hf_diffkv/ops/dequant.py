"""Unpacking bit-plane packed codes in registers (Triton).

With P = 8 / bits, byte j of a row holds elements j, j + D/P, ... from its lowest bits up (`pages/layout.py`), so one
packed tile becomes P tiles and nothing is shuffled. Codes of two fields become the four quarters of a row, each of
them from one tile of either field (loaded by `packed_rows.py`).

MODE 0 (`PORTABLE`) uses shifts and casts: the interpreter, AMD, float32 operands. MODE 1 (`PTX`) builds fp16 numbers
from bits: a code OR-ed into the mantissa of 2^(10 - shift) reads as that power of two plus the code. Keys keep this
bias, which the caller takes off the logit (`code_bias`). Values do not: over thousands of tokens a biased accumulator
would cost more than quantisation does. In decode attention they are the mantissas of subnormal numbers, which no
power of two must be taken off (`code_unit`), elsewhere they lose the bias at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ..config.precision import SUPPORTED_BITS
from ..pages import layout

PORTABLE = 0
PTX = 1
# what unpacked codes are: with their `code_bias`, themselves, or times their `code_unit`
BIASED, EXACT, SUBNORMAL = FORMS = tuple(map(tl.constexpr, range(3)))
BYTES = 0x01010101
HALVES = 0x00010001
PACKED_BITS = tuple(bits for bits in SUPPORTED_BITS if bits < 16)

fields = triton.constexpr_function(layout.fields)


@triton.constexpr_function
def pieces(bits):
    """Equal pieces that a row is unpacked into: the planes of one field, quarters where codes have two."""
    return 4 if len(fields(bits)) > 1 else max(1, 8 // bits)


@triton.constexpr_function
def words(bits):
    """Words that `assembly` takes."""
    return 4 if len(fields(bits)) > 1 else 1


@triton.constexpr_function
def mantissa_bit(bits, piece):
    """Where `assembly` leaves the lowest bits of the codes of a piece."""
    if bits == 3:
        return 4 * (piece // 2)
    if bits > 4:
        return 2 if bits < 8 and piece == 3 else 0
    return bits * piece


def assembly(bits: int, form: int, chosen: Sequence[int]) -> str:
    """PTX that turns words of four packed bytes into two words of two fp16 for each of the `chosen` pieces.

    Of codes of one field it takes one word; of two fields the low field's for the even quarters and for the odd ones
    (the same at 3 bits), and the high field's: for the first and the second half of a quarter where it has one bit,
    zeros in the other half, the same twice where it has two. prmt spreads bytes over 16-bit halves; lop3 with 0xEA is
    (a & b) | c, with 0xE4 it is a where c is set, else b.
    """
    first, second, above, other = (f"${2 * len(chosen) + word}" for word in range(4))
    lines = [".reg .b32 low, high, bias, bits, upper, lower, joined;"]
    if bits in (3, 5):
        # the second half of quarter q is plane 2 q + 1
        lines += [f"shr.u32 bits, {other}, 1;", f"or.b32 bits, bits, {above};"]
        above = "bits"
    outputs = [(f"${2 * output}", f"${2 * output + 1}", piece) for output, piece in enumerate(chosen)]
    for *pair, piece in outputs:
        start = mantissa_bit(bits, piece)
        magic = 0 if form == SUBNORMAL.value else (25 - start) << 10
        if bits == 3:
            # quarters 0 and 2, and 1 and 3, become packed codes of four bits, of which the uppermost means nothing
            lines += _join(first, 2 * (piece % 2), above, 2 - 2 * (piece % 2), 0x33)
            lines += _spread(("low", "high"), "joined", 0) + _pick(pair, 0x7 << start, magic)
        elif bits > 4:
            source = first
            if bits < 8:
                mask = ((1 << bits - 4) - 1) * 0x11 << 2 * (piece % 2)
                lines += [f"and.b32 upper, {above}, {mask * BYTES:#010x};"]
                low_shift, high_shift = ((0, 4), (0, 2), (4, 0), (2, 0))[piece]
                lines += _join((first, second)[piece % 2], low_shift, "upper", high_shift, 0xF << start)
                source = "joined"
            lines += _spread(pair, source, magic >> 8)
        else:
            lines += _spread(("low", "high"), first, 0) + _pick(pair, (1 << bits) - 1 << start, magic)
        if form == EXACT.value:
            lines += [f"mov.b32 bias, {magic * HALVES:#010x};"]
            lines += [f"sub.f16x2 {word}, {word}, bias;" for word in pair]
    return "{\n" + "\n".join(lines) + "\n}"


def _join(lower: str, right: int, upper: str, left: int, taken: int) -> list[str]:
    """Bits `taken` of the bytes of `lower`, shifted right, and the others of `upper`, shifted left, to "joined"."""
    return [
        f"shr.u32 lower, {lower}, {right};",
        f"shl.b32 upper, {upper}, {left};",
        f"lop3.b32 joined, lower, upper, {taken * BYTES:#010x}, 0xE4;",
    ]


def _spread(words: Sequence[str], source: str, upper_byte: int) -> list[str]:
    """Bytes 0 and 1 to the halves of the first word, 2 and 3 to those of the second."""
    selectors = ("0x4140", "0x4342")
    return [f"prmt.b32 {word}, {source}, {upper_byte * BYTES:#010x}, {s};" for word, s in zip(words, selectors)]


def _pick(words: Sequence[str], mask: int, magic: int) -> list[str]:
    """The masked bits of both halves of "low" and "high", with the bits of a power of two."""
    operands = f"{mask * HALVES:#010x}, {magic * HALVES:#010x}, 0xEA;"
    return [f"lop3.b32 {word}, {source}, {operands}" for word, source in zip(words, ("low", "high"))]


@triton.constexpr_function
def constraints(bits, count):
    """Register constraints of `assembly` for so many pieces: no output may share an input's register but the last."""
    return "=&r," * (2 * count - 1) + "=r" + ",r" * words(bits)


# constants, which Triton has in the key of what it compiled
_ALONE = tl.constexpr(
    [
        {bits: [assembly(bits, form, (i,)) for i in range(pieces(bits))] for bits in PACKED_BITS}
        for form in range(len(FORMS))
    ]
)
_TOGETHER = tl.constexpr(
    [{bits: assembly(bits, form, range(pieces(bits))) for bits in PACKED_BITS} for form in range(len(FORMS))]
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
    """What `BIASED` unpacking adds to every code of a piece."""
    return 0.0 if mode == 0 else 1024.0 / 2 ** mantissa_bit(bits, piece)


@triton.constexpr_function
def code_unit(bits, piece, mode):
    """What a code of 1 of a piece becomes by `SUBNORMAL` unpacking, a power of two."""
    return 1.0 if mode == 0 else 2.0 ** (mantissa_bit(bits, piece) - 24)


@triton.jit
def unpack(packed, BITS: tl.constexpr, FORM: tl.constexpr, HERE: tl.constexpr, MODE: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """Tuple of the pieces of a row, as DTYPE; fp16 in PTX mode, which takes tiles of a multiple of 4 bytes.

    Args:
        packed: uint8 [tokens, lanes], a tuple of as many as `assembly` takes words.

        FORM: `BIASED`, `EXACT` or `SUBNORMAL`; they differ in PTX mode.
        HERE: whether they are unpacked in the layout they were loaded in, and what is unpacked may change threads.
            Otherwise Triton moves the change of layout ahead of them, so that every thread unpacks what it multiplies;
            worth it where that is four bytes or more in one place.

    Every piece has its own assembly then, as Triton 3.8 gives only one result of an assembly the layout of a matrix
    operand; the assembler merges what they share. HERE, the assembly is declared impure, which keeps Triton from it.
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
    """Codes of one piece as uint8."""
    COUNT: tl.constexpr = pieces(BITS)
    LOW: tl.constexpr = fields(BITS)[0]
    if LOW == BITS:
        code = packed[0] >> (BITS * PIECE) if PIECE > 0 else packed[0]
        return code & ((1 << BITS) - 1) if PIECE < COUNT - 1 else code
    else:
        # a quarter is a plane of two bits, or half a plane of four, or two planes of one
        low = packed[PIECE % 2] >> (PIECE // 2 * 4) if LOW == 4 else packed[0] >> (PIECE * 2)
        high = packed[2] >> (PIECE * 2)
        if BITS - LOW == 1:
            high = high | packed[3] >> (PIECE * 2 + 1)
        return low & ((1 << LOW) - 1) | (high & ((1 << (BITS - LOW)) - 1)) << LOW
