"""Register contents: bits in unsigned numpy arrays, one element per thread, viewed as an instruction's type."""

from __future__ import annotations

import numpy as np

from .parse import Register

# where the block's shared memory begins; not 0, so that an address without its base is noticed
SHARED_BASE = 1024
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TYPES: dict[str, type] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    # arithmetic on these unpacks them
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "s16x2": np.uint32,
    "u16x2": np.uint32,
    **{f"{kind}{8 * width}": bits for width, bits in BITS.items() for kind in "bu"},
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
}
Values = np.ndarray


class PtxError(Exception):
    """Signals an instruction that a GPU would refuse or execute incorrectly."""


class UnknownInstruction(PtxError):
    """Signals an instruction that the emulator lacks."""


def width_of(type_: str) -> int:
    return np.dtype(TYPES[type_]).itemsize


def as_bits(values: Values, register: Register, signed: bool = False) -> Values:
    """Returns the bits of a register after a write of `values`, extended if the register is wider."""
    if register.predicate:
        return values.astype(np.bool_)
    width = values.dtype.itemsize
    if width == register.width:
        return values.view(BITS[width])
    if width > register.width:
        return values.view(BITS[width]).astype(BITS[register.width])
    narrow = values.view(np.dtype(f"i{width}") if signed else BITS[width])
    return narrow.astype(np.dtype(f"i{register.width}")).view(BITS[register.width])


def bf16_to_f32(bits: Values) -> Values:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(numbers: Values) -> Values:
    """Rounds to nearest, ties to even; NaN becomes 0x7FFF."""
    bits = numbers.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded)


def halves(words: Values, type_: str) -> Values:
    """Splits each 32-bit word into two numbers, [threads, 2], in a type that numpy can compute with."""
    parts = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2)
    return bf16_to_f32(parts) if type_.startswith("bf16") else parts.view(TYPES[type_.removesuffix("x2")])


def words(parts: Values) -> Values:
    """Joins two 16-bit parts into each 32-bit word; reverses `halves`."""
    return np.ascontiguousarray(parts).view(np.uint32).reshape(-1)
