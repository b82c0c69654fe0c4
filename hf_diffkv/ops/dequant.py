"""Unpacking bit-plane packed codes in registers (Triton).

With P = 8 / bits, byte j of a row holds elements j, j + D/P, ... from its lowest bits up (`memory/layout.py`), so one
packed tile becomes P tiles and nothing is shuffled.

MODE 0 (`PORTABLE`) uses shifts and casts: the interpreter, AMD, float32 operands. MODE 1 (`PTX`) builds fp16 numbers
from bits: a code OR-ed into the mantissa of 2^(10 - shift) reads as that power of two plus the code. Keys keep this
bias, which the caller takes off the logit once per tile (`key_bias`); values lose it at once, because over thousands
of tokens a biased accumulator would cost more than quantisation does.
"""

from __future__ import annotations

import triton
import triton.language as tl

PORTABLE = 0
PTX = 1

KEYS_8 = """
    prmt.b32 $0, $2, 0x64646464, 0x4140;
    prmt.b32 $1, $2, 0x64646464, 0x4342;
"""
VALUES_8 = """{
    .reg .b32 bias;
    mov.b32 bias, 0x64006400;
    prmt.b32 $0, $2, 0x64646464, 0x4140;
    prmt.b32 $1, $2, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
}"""


def _plane_asm(bits: int, exact: bool) -> str:
    """PTX for four packed bytes: two words of two fp16 for each plane. lop3 with 0xEA is (a & b) | c."""
    planes = 8 // bits
    packed = f"${2 * planes}"
    lines = [".reg .b32 low, high;", f"prmt.b32 low, {packed}, 0, 0x4140;", f"prmt.b32 high, {packed}, 0, 0x4342;"]
    for plane in range(planes):
        shift = bits * plane
        mask = ((1 << bits) - 1) << shift
        magic = (25 - shift) << 10
        mask, magic = mask << 16 | mask, magic << 16 | magic
        for half, source in enumerate(("low", "high")):
            lines.append(f"lop3.b32 ${2 * plane + half}, {source}, {mask:#010x}, {magic:#010x}, 0xEA;")
    if exact:
        for plane in range(planes):
            magic = (25 - bits * plane) << 10
            lines.insert(1, f".reg .b32 bias{plane};")
            lines.append(f"mov.b32 bias{plane}, {magic << 16 | magic:#010x};")
            lines += [f"sub.f16x2 ${index}, ${index}, bias{plane};" for index in (2 * plane, 2 * plane + 1)]
    return "{\n    " + "\n    ".join(lines) + "\n}"


def _constraints(bits: int) -> str:
    # only the last output may share the input's register: all others are written while it is still read
    outputs = 2 * (8 // bits)
    return ",".join(["=&r"] * (outputs - 1) + ["=r", "r"])


KEYS_4, KEYS_2, KEYS_1 = (_plane_asm(bits, exact=False) for bits in (4, 2, 1))
VALUES_4, VALUES_2, VALUES_1 = (_plane_asm(bits, exact=True) for bits in (4, 2, 1))
REGISTERS_8, REGISTERS_4, REGISTERS_2, REGISTERS_1 = (_constraints(bits) for bits in (8, 4, 2, 1))

_KEYS_8, _VALUES_8 = tl.constexpr(KEYS_8), tl.constexpr(VALUES_8)
_KEYS_4, _VALUES_4 = tl.constexpr(KEYS_4), tl.constexpr(VALUES_4)
_KEYS_2, _VALUES_2 = tl.constexpr(KEYS_2), tl.constexpr(VALUES_2)
_KEYS_1, _VALUES_1 = tl.constexpr(KEYS_1), tl.constexpr(VALUES_1)
_REGISTERS_8, _REGISTERS_4 = tl.constexpr(REGISTERS_8), tl.constexpr(REGISTERS_4)
_REGISTERS_2, _REGISTERS_1 = tl.constexpr(REGISTERS_2), tl.constexpr(REGISTERS_1)


@triton.constexpr_function
def key_bias(bits, plane, mode):
    """What `unpack_keys` adds to every code of a plane."""
    return 0.0 if mode == 0 else 1024.0 / 2 ** (bits * plane)


@triton.jit
def extract(packed, shift, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of uint8 `packed` from bit `shift` (scalar or tensor) up, as DTYPE; any layout, never biased."""
    return ((packed.to(tl.int32) >> shift) & ((1 << BITS) - 1)).to(DTYPE)


@triton.jit
def _planes(packed, BITS: tl.constexpr, DTYPE: tl.constexpr):
    if BITS == 8:
        return (packed.to(DTYPE),)
    out = ()
    for plane in tl.static_range(8 // BITS):
        out = out + (((packed >> (BITS * plane)) & ((1 << BITS) - 1)).to(DTYPE),)
    return out


@triton.jit
def unpack_keys(packed, BITS: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """Tuple of 8 / BITS planes of a uint8 tile (a multiple of 4 bytes along its rows), each code plus `key_bias`."""
    h: tl.constexpr = tl.float16
    if MODE == 0:
        return _planes(packed, BITS, DTYPE)
    elif BITS == 8:
        return (tl.inline_asm_elementwise(_KEYS_8, _REGISTERS_8, [packed], dtype=h, is_pure=True, pack=4),)
    elif BITS == 4:
        return tl.inline_asm_elementwise(_KEYS_4, _REGISTERS_4, [packed], dtype=(h,) * 2, is_pure=True, pack=4)
    elif BITS == 2:
        return tl.inline_asm_elementwise(_KEYS_2, _REGISTERS_2, [packed], dtype=(h,) * 4, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_KEYS_1, _REGISTERS_1, [packed], dtype=(h,) * 8, is_pure=True, pack=4)


@triton.jit
def unpack_values(packed, BITS: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """Tuple of 8 / BITS planes of a uint8 tile, exact codes.

    The assembly is declared impure so that Triton does not move the layout change that the transposed operand needs
    ahead of it, where it would read shared memory byte by byte.
    """
    h: tl.constexpr = tl.float16
    if MODE == 0:
        return _planes(packed, BITS, DTYPE)
    elif BITS == 8:
        return (tl.inline_asm_elementwise(_VALUES_8, _REGISTERS_8, [packed], dtype=h, is_pure=False, pack=4),)
    elif BITS == 4:
        return tl.inline_asm_elementwise(_VALUES_4, _REGISTERS_4, [packed], dtype=(h,) * 2, is_pure=False, pack=4)
    elif BITS == 2:
        return tl.inline_asm_elementwise(_VALUES_2, _REGISTERS_2, [packed], dtype=(h,) * 4, is_pure=False, pack=4)
    else:
        return tl.inline_asm_elementwise(_VALUES_1, _REGISTERS_1, [packed], dtype=(h,) * 8, is_pure=False, pack=4)


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
