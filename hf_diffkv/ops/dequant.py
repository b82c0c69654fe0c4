"""Unpacking bit-plane packed codes in registers (Triton).

With P = 8 / bits, byte j of a row holds elements j, j + D/P, ... from its lowest bits up (`memory/layout.py`), so one
packed tile becomes P tiles and nothing is shuffled.

MODE 0 (`PORTABLE`) uses shifts and casts: the interpreter, AMD, float32 operands. MODE 1 (`PTX`) builds fp16 numbers
from bits: a code OR-ed into the mantissa of 2^(10 - shift) reads as that power of two plus the code. Keys keep this
bias, which the caller takes off the logit (`code_bias`); values lose it at once, because over thousands
of tokens a biased accumulator would cost more than quantisation does.
"""

from __future__ import annotations

import triton
import triton.language as tl

PORTABLE = 0
PTX = 1


def assembly(bits: int, exact: bool) -> str:
    """PTX that turns one word of four packed bytes into two words of two fp16 per plane.

    prmt spreads bytes over 16-bit halves; lop3 with 0xEA is (a & b) | c.
    """
    planes = 8 // bits
    packed = f"${2 * planes}"
    magics = [f"{((25 - bits * plane) << 10) * 0x10001:#010x}" for plane in range(planes)]
    lines = [".reg .b32 low, high, bias;"]
    if bits == 8:
        lines += [f"prmt.b32 $0, {packed}, 0x64646464, 0x4140;", f"prmt.b32 $1, {packed}, 0x64646464, 0x4342;"]
    else:
        lines += [f"prmt.b32 low, {packed}, 0, 0x4140;", f"prmt.b32 high, {packed}, 0, 0x4342;"]
        for plane, magic in enumerate(magics):
            mask = f"{(((1 << bits) - 1) << bits * plane) * 0x10001:#010x}"
            lines += [f"lop3.b32 ${2 * plane}, low, {mask}, {magic}, 0xEA;"]
            lines += [f"lop3.b32 ${2 * plane + 1}, high, {mask}, {magic}, 0xEA;"]
    if exact:
        for plane, magic in enumerate(magics):
            lines += [f"mov.b32 bias, {magic};"]
            lines += [f"sub.f16x2 ${output}, ${output}, bias;" for output in (2 * plane, 2 * plane + 1)]
    return "{\n" + "\n".join(lines) + "\n}"


def constraints(bits: int) -> str:
    """Register constraints of `assembly`: no output may share the input's register but the last."""
    return ",".join(["=&r"] * (2 * (8 // bits) - 1) + ["=r", "r"])


_BIASED_8, _EXACT_8 = tl.constexpr(assembly(8, False)), tl.constexpr(assembly(8, True))
_BIASED_4, _EXACT_4 = tl.constexpr(assembly(4, False)), tl.constexpr(assembly(4, True))
_BIASED_2, _EXACT_2 = tl.constexpr(assembly(2, False)), tl.constexpr(assembly(2, True))
_BIASED_1, _EXACT_1 = tl.constexpr(assembly(1, False)), tl.constexpr(assembly(1, True))
_REGISTERS_8, _REGISTERS_4 = tl.constexpr(constraints(8)), tl.constexpr(constraints(4))
_REGISTERS_2, _REGISTERS_1 = tl.constexpr(constraints(2)), tl.constexpr(constraints(1))


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

    Keys are unpacked with EXACT = False and carry `code_bias`, values with EXACT = True. The assembly of the latter is
    declared impure so that Triton does not move the layout change of a transposed operand ahead of it, where shared
    memory would be read byte by byte.
    """
    if MODE == 0:
        planes = ()
        for plane in tl.static_range(8 // BITS):
            code = packed >> (BITS * plane) if plane > 0 else packed
            code = code & ((1 << BITS) - 1) if plane < 8 // BITS - 1 else code
            planes = planes + (code.to(DTYPE),)
        return planes
    elif BITS == 8:
        asm8: tl.constexpr = _EXACT_8 if EXACT else _BIASED_8
        plane = tl.inline_asm_elementwise(asm8, _REGISTERS_8, [packed], dtype=tl.float16, is_pure=not EXACT, pack=4)
        return (plane,)
    elif BITS == 4:
        asm4: tl.constexpr = _EXACT_4 if EXACT else _BIASED_4
        return tl.inline_asm_elementwise(
            asm4, _REGISTERS_4, [packed], dtype=(tl.float16, tl.float16), is_pure=not EXACT, pack=4
        )
    elif BITS == 2:
        asm2: tl.constexpr = _EXACT_2 if EXACT else _BIASED_2
        return tl.inline_asm_elementwise(
            asm2,
            _REGISTERS_2,
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=not EXACT,
            pack=4,
        )
    else:
        asm1: tl.constexpr = _EXACT_1 if EXACT else _BIASED_1
        return tl.inline_asm_elementwise(
            asm1,
            _REGISTERS_1,
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=not EXACT,
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
