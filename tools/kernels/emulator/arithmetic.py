"""Instructions that compute registers from registers, thread by thread: a table from opcode to types and function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from . import conversions
from .values import BITS, TYPES, UnknownInstruction, Values, bf16_to_f32, f32_to_bf16, halves, width_of, words


@dataclass(frozen=True)
class Operation:
    """`compute` takes one array per source and returns the result as numbers of type `result`."""

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., Values]


_families: dict[str, Callable[[list[str]], Operation]] = {}


def _family(*names: str) -> Callable[[Callable[[list[str]], Operation]], Callable[[list[str]], Operation]]:
    """Registers a function that makes an operation from the modifiers of an opcode."""

    def register(make: Callable[[list[str]], Operation]) -> Callable[[list[str]], Operation]:
        _families.update(dict.fromkeys(names, make))
        return make

    return register


@cache
def operation(opcode: str) -> Operation | None:
    """Returns an opcode's operation, or None for other kinds (memory, control, matrices, exchange between threads).

    Raises:
        UnknownInstruction: the kind is known, but not with these modifiers.
    """
    name, *modifiers = opcode.split(".")
    if name not in _families:
        return None
    made = _families[name](modifiers)
    if made is None or made.result not in TYPES:
        raise UnknownInstruction(opcode)
    return made


def _need(modifiers: list[str], *allowed: str) -> str:
    """Returns the type, which comes last, and checks that all other modifiers are allowed."""
    *rest, type_ = modifiers
    if type_ not in TYPES or not set(rest) <= set(allowed):
        raise UnknownInstruction(".".join(modifiers))
    return type_


def _flush(numbers: Values) -> Values:
    """Flushes denormal float32 to zero of the same sign."""
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.copysign(np.float32(0), numbers), numbers)


def _flushed(compute: Callable[..., Values]) -> Callable[..., Values]:
    return lambda *sources: _flush(compute(*map(_flush, sources)))


def _packed(type_: str, compute: Callable[..., Values]) -> Callable[..., Values]:
    """Lifts a function of 16-bit numbers (bf16 is computed in float32) to registers that hold one or two of them."""
    if type_ == "bf16":
        return lambda *sources: f32_to_bf16(compute(*map(bf16_to_f32, sources)))
    if type_ == "bf16x2":
        return lambda *sources: words(f32_to_bf16(compute(*(halves(x, type_) for x in sources))))
    if type_ in ("f16x2", "s16x2", "u16x2"):
        return lambda *sources: words(compute(*(halves(x, type_) for x in sources)))
    return compute


def _elementwise(name: str, compute: Callable[..., Values], sources: int = 2) -> None:
    @_family(name)
    def make(modifiers: list[str]) -> Operation:
        type_ = _need(modifiers, "rn", "ftz")
        function = _packed(type_, compute)
        return Operation(type_, (type_,) * sources, _flushed(function) if "ftz" in modifiers else function)


_elementwise("add", np.add)
_elementwise("sub", np.subtract)


_elementwise("neg", np.negative, 1)
_elementwise("abs", np.abs, 1)


@_family("mul")
def _mul(modifiers: list[str]) -> Operation:
    if modifiers[0] == "wide":
        type_, wide = modifiers[1], modifiers[1][0] + str(16 * width_of(modifiers[1]))
        return Operation(wide, (type_, type_), lambda a, b: a.astype(TYPES[wide]) * b.astype(TYPES[wide]))
    if modifiers[0] == "hi":
        type_ = modifiers[1]
        bits = 8 * width_of(type_)
        # 64 bits need Python's integers
        wide = TYPES[type_[0] + "64"] if bits < 64 else object

        def high(a: Values, b: Values) -> Values:
            return ((a.astype(wide) * b.astype(wide)) >> bits).astype(TYPES[type_])

        return Operation(type_, (type_, type_), high)
    type_ = _need(modifiers, "lo", "rn")
    return Operation(type_, (type_, type_), _packed(type_, np.multiply))


@_family("mad")
def _mad(modifiers: list[str]) -> Operation:
    product = _mul(modifiers)
    if modifiers[0] not in ("wide", "lo"):
        raise UnknownInstruction("mad." + modifiers[0])
    return Operation(product.result, (*product.sources, product.result), lambda a, b, c: product.compute(a, b) + c)


@_family("fma")
def _fma(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers, "rn", "ftz")
    if type_ == "f64" or "rn" not in modifiers:
        raise UnknownInstruction("fma." + type_)
    base = type_.removesuffix("x2")
    final = np.float16 if base == "f16" else np.float32

    def fused(a: Values, b: Values, c: Values) -> Values:
        if base == "bf16":
            # rounding to float32 first may differ in the last bit
            raise UnknownInstruction("fma." + type_)
        return odd_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)).astype(final)

    function = _packed(type_, fused)
    return Operation(type_, (type_,) * 3, _flushed(function) if "ftz" in modifiers else function)


def odd_sum(a: Values, b: Values) -> Values:
    """a + b in float64, rounded to odd, so that rounding it again gives the result of a single rounding."""
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)
    inexact = np.isfinite(total) & (error != 0)
    bits = total.view(np.int64) - (inexact & ((error < 0) != (total < 0)))
    return (bits | inexact).view(np.float64)


@_family("div")
def _div(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers, "full", "rn")
    if type_[0] == "f":
        return Operation(type_, (type_, type_), np.divide)
    return Operation(type_, (type_, type_), lambda a, b: _divide(a, b)[0])


@_family("rem")
def _rem(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    return Operation(type_, (type_, type_), lambda a, b: _divide(a, b)[1])


def _divide(a: Values, b: Values) -> tuple[Values, Values]:
    """Returns the integer quotient towards zero and the remainder. Division by zero, undefined in PTX, gives ones."""
    a, b = np.broadcast_arrays(a, b)
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    remainder = np.fmod(a, safe)
    quotient = (a - remainder) // safe
    return np.where(zero, ~b.dtype.type(0), quotient), np.where(zero, ~b.dtype.type(0), remainder)


@_family("ex2")
def _ex2(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers, "approx", "ftz")
    if type_ != "f32":
        raise UnknownInstruction("ex2." + type_)
    function = _flushed(np.exp2) if "ftz" in modifiers else np.exp2
    return Operation(type_, (type_,), function)


def _extreme(floats: Callable[..., Values], integers: Callable[..., Values]) -> Callable[[list[str]], Operation]:
    def make(modifiers: list[str]) -> Operation:
        type_ = _need(modifiers)
        return Operation(type_, (type_, type_), _packed(type_, floats if "f" in type_ else integers))

    return make


_families.update(max=_extreme(np.fmax, np.maximum), min=_extreme(np.fmin, np.minimum))


def _bitwise(function: Callable[..., Values], sources: int = 2) -> Callable[[list[str]], Operation]:
    def make(modifiers: list[str]) -> Operation:
        type_ = _need(modifiers)
        return Operation(type_, (type_,) * sources, function)

    return make


_families.update(
    {
        "and": _bitwise(np.bitwise_and),
        "or": _bitwise(np.bitwise_or),
        "xor": _bitwise(np.bitwise_xor),
        # numpy's inversion of bool is the logical one
        "not": _bitwise(np.bitwise_not, 1),
    }
)


@_family("shl")
def _shl(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    bits = 8 * width_of(type_)
    return Operation(
        type_,
        (type_, "u32"),
        lambda a, n: np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0)),
    )


@_family("shr")
def _shr(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    bits = 8 * width_of(type_)
    if type_[0] == "s":
        return Operation(type_, (type_, "u32"), lambda a, n: a >> np.minimum(n, bits - 1).astype(a.dtype))
    return Operation(
        type_,
        (type_, "u32"),
        lambda a, n: np.where(n < bits, a >> np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0)),
    )


@_family("shf")
def _shf(modifiers: list[str]) -> Operation:
    direction, mode, type_ = modifiers
    if mode != "wrap" or type_ != "b32":
        raise UnknownInstruction("shf." + ".".join(modifiers))

    def funnel(low: Values, high: Values, count: Values) -> Values:
        pair = (high.astype(np.uint64) << np.uint64(32)) | low
        count = (count & 31).astype(np.uint64)
        moved = (pair << count) >> np.uint64(32) if direction == "l" else pair >> count
        return moved.astype(np.uint32)

    return Operation(type_, ("b32", "b32", "u32"), funnel)


@_family("bfe")
def _bfe(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    bits = 8 * width_of(type_)
    wide = np.int64 if type_[0] == "s" else np.uint64

    def extract(a: Values, position: Values, length: Values) -> Values:
        position = position & 255
        shifted = a.astype(wide) >> np.minimum(position, 63).astype(wide)
        if type_[0] == "u":
            shifted = np.where(position < 64, shifted, wide(0))
        above = (64 - np.minimum(length & 255, bits)).astype(wide)
        # a shift by 64 as two steps, which leaves nothing
        half = above >> wide(1)
        value = ((shifted << half) << (above - half)) >> half >> (above - half)
        return value.astype(TYPES[type_])

    return Operation(type_, (type_, "u32", "u32"), extract)


@_family("bfi")
def _bfi(modifiers: list[str]) -> Operation:
    if modifiers != ["b32"]:
        raise UnknownInstruction("bfi." + ".".join(modifiers))

    def insert(field: Values, into: Values, position: Values, length: Values) -> Values:
        position, length = (np.minimum(x & 255, 32).astype(np.uint64) for x in (position, length))
        mask = ((np.uint64(1) << length) - np.uint64(1)) << position
        return (into & ~mask | field.astype(np.uint64) << position & mask).astype(np.uint32)

    return Operation("b32", ("b32", "b32", "u32", "u32"), insert)


@_family("popc")
def _popc(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    bits = BITS[width_of(type_)]
    return Operation(
        "u32", (type_,), lambda a: sum((a >> bits(i)) & bits(1) for i in range(8 * width_of(type_))).astype(np.uint32)
    )


@_family("prmt")
def _prmt(modifiers: list[str]) -> Operation:
    if modifiers != ["b32"]:
        raise UnknownInstruction("prmt." + ".".join(modifiers))

    def permute(a: Values, b: Values, selector: Values) -> Values:
        a, b, selector = np.broadcast_arrays(a, b, selector)
        pool = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros(a.shape, np.uint32)
        for byte in range(4):
            nibble = (selector >> (4 * byte)) & 15
            picked = ((pool >> ((nibble & 7) * 8).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
            sign = np.where(picked & 128, np.uint32(255), np.uint32(0))
            result |= np.where(nibble & 8, sign, picked) << np.uint32(8 * byte)
        return result

    return Operation("b32", ("b32", "b32", "b32"), permute)


@_family("lop3")
def _lop3(modifiers: list[str]) -> Operation:
    def logic(a: Values, b: Values, c: Values, table: Values) -> Values:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for row in range(8):
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            if int(table[0]) >> row & 1:
                result |= term
        return result

    return Operation(_need(modifiers), ("b32", "b32", "b32", "u32"), logic)


@_family("selp")
def _selp(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    return Operation(type_, (type_, type_, "pred"), lambda a, b, p: np.where(p, a, b))


COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
# whether neither of two floating-point numbers is NaN, and whether at least one is
NAN_COMPARE = {"num": False, "nan": True}


@_family("setp")
def _setp(modifiers: list[str]) -> Operation:
    name, type_ = modifiers[0], _need(modifiers[1:])
    unordered = name.endswith("u") and "f" in type_ and name[:-1] in COMPARE
    compare = COMPARE.get(name[:-1] if unordered else name)
    if type_ == "f32" and name in NAN_COMPARE:
        return Operation("pred", (type_, type_), lambda a, b: (np.isnan(a) | np.isnan(b)) == NAN_COMPARE[name])
    if compare is None or type_ == "bf16":
        raise UnknownInstruction("setp." + ".".join(modifiers))
    if "f" not in type_:
        return Operation("pred", (type_, type_), compare)

    def ordered(a: Values, b: Values) -> Values:
        if type_.endswith("x2"):
            a, b = halves(a, type_), halves(b, type_)
        missing = np.isnan(a) | np.isnan(b)
        return compare(a, b) | missing if unordered else compare(a, b) & ~missing

    return Operation("pred", (type_, type_), ordered)


@_family("cvt")
def _cvt(modifiers: list[str]) -> Operation:
    return Operation(*conversions.conversion(modifiers))


@_family("mov")
def _mov(modifiers: list[str]) -> Operation:
    type_ = _need(modifiers)
    return Operation(type_, (type_,), lambda a: a)
