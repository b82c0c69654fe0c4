"""Unpacking bit-plane packed codes in registers (Triton).

With P = 8 / bits, byte j of a row holds elements j, j + D/P, ... from its lowest bits up (`memory/layout.py`), so one
packed tile becomes P tiles and nothing is shuffled.

MODE 0 (`PORTABLE`) uses shifts and casts: the interpreter, AMD, float32 operands. MODE 1 (`PTX`) builds fp16 numbers
from bits: a code OR-ed into the mantissa of 2^(10 - shift) reads as that power of two plus the code. Keys keep this
bias, which the caller takes off the logit (`code_bias`); values lose it at once, because over thousands
of tokens a biased accumulator would cost more than quantisation does.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

PORTABLE = 0
PTX = 1


def assembly(bits: int, exact: bool, planes: Sequence[int]) -> str:
    """PTX that turns one word of four packed bytes into two words of two fp16 for each of `planes`.

    prmt spreads bytes over 16-bit halves; lop3 with 0xEA is (a & b) | c.
    """
    packed = f"${2 * len(planes)}"
    magics = [f"{((25 - bits * plane) << 10) * 0x10001:#010x}" for plane in planes]
    lines = [".reg .b32 low, high, bias;"]
    if bits == 8:
        lines += [f"prmt.b32 $0, {packed}, 0x64646464, 0x4140;", f"prmt.b32 $1, {packed}, 0x64646464, 0x4342;"]
    else:
        lines += [f"prmt.b32 low, {packed}, 0, 0x4140;", f"prmt.b32 high, {packed}, 0, 0x4342;"]
        for output, plane in enumerate(planes):
            mask = f"{(((1 << bits) - 1) << bits * plane) * 0x10001:#010x}"
            lines += [f"lop3.b32 ${2 * output}, low, {mask}, {magics[output]}, 0xEA;"]
            lines += [f"lop3.b32 ${2 * output + 1}, high, {mask}, {magics[output]}, 0xEA;"]
    if exact:
        for output, magic in enumerate(magics):
            lines += [f"mov.b32 bias, {magic};"]
            lines += [f"sub.f16x2 ${word}, ${word}, bias;" for word in (2 * output, 2 * output + 1)]
    return "{\n" + "\n".join(lines) + "\n}"


def constraints(planes: int) -> str:
    """Register constraints of `assembly`: no output may share the input's register but the last."""
    return ",".join(["=&r"] * (2 * planes - 1) + ["=r", "r"])


def _biased(bits: int) -> tl.constexpr:
    return tl.constexpr(tuple(assembly(bits, False, (plane,)) for plane in range(8 // bits)))


def _exact(bits: int) -> tl.constexpr:
    return tl.constexpr(assembly(bits, True, range(8 // bits)))


_BIASED_8, _BIASED_4, _BIASED_2, _BIASED_1 = _biased(8), _biased(4), _biased(2), _biased(1)
_EXACT_8, _EXACT_4, _EXACT_2, _EXACT_1 = _exact(8), _exact(4), _exact(2), _exact(1)
_REGISTERS_8, _REGISTERS_4 = tl.constexpr(constraints(1)), tl.constexpr(constraints(2))
_REGISTERS_2, _REGISTERS_1 = tl.constexpr(constraints(4)), tl.constexpr(constraints(8))


@triton.constexpr_function
def code_bias(bits, plane, mode):
    """What inexact `unpack` adds to every code of a plane."""
    return 0.0 if mode == 0 else 1024.0 / 2 ** (bits * plane)


@triton.jit
def extract(packed, shift, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of uint8 `packed` from bit `shift` (scalar or tensor) up, as DTYPE; any layout, never biased."""
    return ((packed.to(tl.int32) >> shift) & ((1 << BITS) - 1)).to(DTYPE)


@triton.jit
def unpack(packed, BITS: tl.constexpr, EXACT: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """Tuple of the 8 / BITS planes of a uint8 tile whose rows are a multiple of 4 bytes; fp16 in PTX mode.

    Keys are unpacked with EXACT = False and carry `code_bias`, values with EXACT = True. Every plane of the former has
    its own assembly, as Triton 3.8 gives only one result of an assembly the layout of a matrix operand; the assembler
    merges what they share. The assembly of the latter is declared impure so that Triton does not move the layout change
    of a transposed operand ahead of it, where shared memory would be read byte by byte.
    """
    if MODE == 0:
        planes = ()
        for plane in tl.static_range(8 // BITS):
            code = packed >> (BITS * plane) if plane > 0 else packed
            code = code & ((1 << BITS) - 1) if plane < 8 // BITS - 1 else code
            planes = planes + (code.to(DTYPE),)
        return planes
    elif not EXACT:
        texts: tl.constexpr = (
            _BIASED_8 if BITS == 8 else _BIASED_4 if BITS == 4 else _BIASED_2 if BITS == 2 else _BIASED_1
        )
        planes = ()
        for plane in tl.static_range(8 // BITS):
            code = tl.inline_asm_elementwise(
                texts[plane], _REGISTERS_8, [packed], dtype=tl.float16, is_pure=True, pack=4
            )
            planes = planes + (code,)
        return planes
    elif BITS == 8:
        plane = tl.inline_asm_elementwise(_EXACT_8, _REGISTERS_8, [packed], dtype=tl.float16, is_pure=False, pack=4)
        return (plane,)
    elif BITS == 4:
        return tl.inline_asm_elementwise(
            _EXACT_4, _REGISTERS_4, [packed], dtype=(tl.float16, tl.float16), is_pure=False, pack=4
        )
    elif BITS == 2:
        return tl.inline_asm_elementwise(
            _EXACT_2,
            _REGISTERS_2,
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=False,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            _EXACT_1,
            _REGISTERS_1,
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=False,
            pack=4,
        )


@triton.jit
def load_metadata(pointer):
    """(scale, zero) in float32 from one 4-byte load: fp16 scale in the low half, fp16 zero point in the high half.

    Args:
        pointer: uint8 pointers, 4-byte aligned, of any shape.
    """
    word = tl.load(pointer.to(tl.pointer_type(tl.uint32)))
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    zero = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)
