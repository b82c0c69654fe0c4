"""Precision of stored tokens: bits and quantisation groups of keys and values."""

from __future__ import annotations

import dataclasses
import numbers
import re
from dataclasses import dataclass
from typing import Any

# supported precisions are listed only here and in native/precision.h; `fields` in pages/layout.py defines the packing
SUPPORTED_BITS = (1, 2, 3, 4, 5, 6, 8, 16)
CODE_BITS = tuple(bits for bits in SUPPORTED_BITS if bits < 16)
# bits of keys and values, then their groups
PRECISION_NAME = re.compile(r"K(\d+)V(\d+)(?:g(\d+)/(\d+))?")


def is_integer(value: Any) -> bool:
    """Returns whether `value` is an integer, NumPy integers included and booleans excluded."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Precision:
    """Bits of keys and values, and number of quantisation groups per token.

    Args:
        k_bits: bits per key element, one of `SUPPORTED_BITS`; 16 keeps the model's dtype.
        v_bits: bits per value element, one of `SUPPORTED_BITS`; 16 keeps the model's dtype.
        k_groups: number of equal-sized groups of a key's elements, each with its own scale and zero point.
        v_groups: number of equal-sized groups of a value's elements, each with its own scale and zero point.

    Raises:
        ValueError: the number of bits is not supported, or the number of groups is below 1.
    """

    k_bits: int
    v_bits: int
    k_groups: int = 1
    v_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            bits = getattr(self, name)
            if not is_integer(bits) or bits not in SUPPORTED_BITS:
                raise ValueError(f"Precision.{name}={bits!r} is not supported; use one of {SUPPORTED_BITS}.")
        for name in ("k_groups", "v_groups"):
            groups = getattr(self, name)
            if not is_integer(groups) or groups < 1:
                raise ValueError(f"Precision.{name}={groups!r} must be an integer of at least 1.")
        for name in ("k_bits", "v_bits", "k_groups", "v_groups"):
            # plain Python integers, which JSON can store
            object.__setattr__(self, name, int(getattr(self, name)))

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Parses a `full_name`, such as `K8V4`, or `K4V2g2/4` with several groups.

        Raises:
            ValueError: the text is not the name of a precision, or its number of bits is not supported.
        """
        match = PRECISION_NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not the name of a precision; write it as 'K8V4', or 'K4V2g2/4' with groups.")
        return cls(*(int(part) for part in match.groups() if part is not None))

    @property
    def name(self) -> str:
        """Name of the precision in the papers, for example `K8V4`."""
        return f"K{self.k_bits}V{self.v_bits}"

    @property
    def full_name(self) -> str:
        """Name that `parse` reads: `name`, followed by the groups if there is more than one."""
        groups = "" if self.k_groups == self.v_groups == 1 else f"g{self.k_groups}/{self.v_groups}"
        return self.name + groups

    def to_dict(self) -> dict[str, int]:
        """Returns the fields, which `as_precision` reads. Transformers saves dataclasses in this form."""
        return dataclasses.asdict(self)


def as_precision(name: str, value: Any) -> Precision:
    """Converts any form in which a precision can be given.

    Args:
        name: name of the option, for error messages.
        value: a `Precision`, its name, a dict of its fields, or a list or tuple of them.

    Raises:
        ValueError: `value` is none of these; the message contains `name`.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        try:
            return Precision.parse(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from error
    if isinstance(value, dict):
        known = [field.name for field in dataclasses.fields(Precision)]
        if set(value) - set(known):
            raise ValueError(f"unknown keys {sorted(set(value) - set(known))} in {name}; known keys are {known}.")
        if not {"k_bits", "v_bits"} <= set(value):
            raise ValueError(f"{name}={value!r} must have both k_bits and v_bits.")
        return Precision(**value)
    if isinstance(value, (tuple, list)) and 2 <= len(value) <= 4:
        return Precision(*value)
    raise ValueError(f"{name}={value!r} is not a Precision; use Precision(k_bits, v_bits), 'K8V4' or [k_bits, v_bits].")
