"""How precisely a stored token is kept."""

from __future__ import annotations

import dataclasses
import numbers
import re
from dataclasses import dataclass
from typing import Any

# with native/precision.h all that knows which precisions there are; `fields` of pages/layout.py is how they are packed
SUPPORTED_BITS = (1, 2, 3, 4, 5, 6, 8, 16)
CODE_BITS = tuple(bits for bits in SUPPORTED_BITS if bits < 16)
# bits of keys and values, then groups of both
PRECISION_NAME = re.compile(r"K(\d+)V(\d+)(?:g(\d+)/(\d+))?")


def is_integer(value: Any) -> bool:
    """Also of NumPy, where numbers often come from."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Precision:
    """Bits of keys and values and the quantisation groups of each token.

    Args:
        k_bits: bits per key element, one of `SUPPORTED_BITS` (16 keeps the model's own dtype).
        v_bits: bits per value element, likewise.
        k_groups: equal groups of `head_dim` with their own scale and zero point, for keys.
        v_groups: the same for values.

    Raises:
        ValueError: bits that are not supported or groups below 1.
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
            # plain numbers, which JSON knows
            object.__setattr__(self, name, int(getattr(self, name)))

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Reads a name as `name` gives it, with groups where there are more than one: `K8V4`, `K4V2g2/4`.

        Raises:
            ValueError: not such a name, or bits that are not supported.
        """
        match = PRECISION_NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not the name of a precision; write it as 'K8V4', or 'K4V2g2/4' with groups.")
        return cls(*(int(part) for part in match.groups() if part is not None))

    @property
    def name(self) -> str:
        """The papers' name of the precision, for example `K8V4`."""
        return f"K{self.k_bits}V{self.v_bits}"

    @property
    def full_name(self) -> str:
        """`name`, with groups where there are more than one: what `parse` reads."""
        groups = "" if self.k_groups == self.v_groups == 1 else f"g{self.k_groups}/{self.v_groups}"
        return self.name + groups


def as_precision(name: str, value: Any) -> Precision:
    """A precision in any form a user may give it: itself, its name, a dict of its fields, or a list of them.

    Raises:
        ValueError: none of these; the message says so of `name`.
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
