"""`cvt`: conversion from one type to another, with the roundings that occur."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .values import TYPES, UnknownInstruction, Values, bf16_to_f32, f32_to_bf16, words

Conversion = tuple[str, tuple[str, ...], Callable[..., Values]]


def conversion(modifiers: list[str]) -> Conversion:
    """Returns the result type, source types and function of `cvt.` + modifiers."""
    *how, result, source = modifiers
    if result in ("f16x2", "bf16x2") and how == ["rn"] and source == "f32":
        narrow = _to_f16 if result == "f16x2" else f32_to_bf16
        # the first source becomes the upper half
        return result, ("f32", "f32"), lambda a, b: words(np.stack(np.broadcast_arrays(narrow(b), narrow(a)), 1))
    integers = result[0] in "us" and source[0] in "us"
    if integers and not how:
        return result, (source,), lambda a: a.astype(TYPES[result])
    if result[0] == "s" and source == "f32" and how == ["rzi"]:
        return result, (source,), lambda a: _truncate(a, TYPES[result])
    if result == "f32" and source[0] in "us" and how == ["rn"]:
        return result, (source,), lambda a: a.astype(np.float32)
    if result == "f16" and source[0] in "us" and how == ["rn"]:
        # exact in float64, so rounded once
        return result, (source,), lambda a: a.astype(np.float64).astype(np.float16)
    if result == "f32" and source == "f16" and not how:
        return result, (source,), lambda a: a.astype(np.float32)
    if result == "f32" and source == "bf16" and not how:
        return result, (source,), bf16_to_f32
    if result in ("f16", "bf16") and source == "f32" and how == ["rn"]:
        return result, (source,), _to_f16 if result == "f16" else f32_to_bf16
    raise UnknownInstruction("cvt." + ".".join(modifiers))


def _to_f16(numbers: Values) -> Values:
    return numbers.astype(np.float16)


def _truncate(numbers: Values, dtype: type) -> Values:
    """Rounds towards zero within the limits of `dtype`; NaN becomes 0."""
    limits = np.iinfo(dtype)
    wide = np.trunc(numbers.astype(np.float64))
    inside = (wide >= limits.min) & (wide <= limits.max)
    whole = np.where(inside, wide, 0).astype(dtype)
    whole = np.where(wide > limits.max, dtype(limits.max), whole)
    return np.where(wide < limits.min, dtype(limits.min), whole)
