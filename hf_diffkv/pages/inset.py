"""Insets: by how much the codes of rotated keys and values end before their range does (ours).

The elements of a rotated key or value are about normally distributed, so few are near the ends of their range. Codes
that end a part of the range before it lose less, but shrink values on average, which a sum over many tokens would not
even out. Values are divided by that shrinkage before they are quantised. The mean square error that is left is .65 of
that of codes from end to end for 2 bits and 64 elements, .87 for 3 bits and .96 for 4; for 128 elements .56, .79 and
.93.

Keys of so few bits are mostly rounded for queries (`ops/rounding`), which makes up for most of the shrinkage. Their
insets are smaller.

The tables were made by quantising normally distributed rows, and keys of prompts (docs/notes/quality-studies.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Inset(NamedTuple):
    """How keys or values of some bits are quantised.

    Attributes:
        parts: parts of the range of a group, of which one at each end is left to the outermost codes; 0 leaves none.
        shrinkage: scalar product of a value with its codes over that with itself; values are divided by it. 1 for keys.
    """

    parts: float
    shrinkage: float = 1.0


FULL_RANGE = Inset(0.0)
# by elements of a group and bits; all numbers are exact in float32
_Table = Mapping[int, Mapping[int, Inset]]
_VALUES: _Table = {
    16: {2: Inset(10.5, 941 / 1024), 3: Inset(48.0, 1009 / 1024)},
    32: {2: Inset(7.5, 926 / 1024), 3: Inset(24.0, 1000 / 1024)},
    64: {2: Inset(6.0, 919 / 1024), 3: Inset(14.0, 992 / 1024), 4: Inset(48.0, 1016 / 1024)},
    96: {2: Inset(5.5, 920 / 1024), 3: Inset(12.0, 993 / 1024), 4: Inset(32.0, 1015 / 1024)},
    128: {2: Inset(5.0, 909 / 1024), 3: Inset(10.0, 989 / 1024), 4: Inset(24.0, 1013 / 1024)},
    192: {2: Inset(4.5, 897 / 1024), 3: Inset(9.0, 991 / 1024), 4: Inset(20.0, 1014 / 1024)},
    256: {2: Inset(4.5, 910 / 1024), 3: Inset(8.0, 989 / 1024), 4: Inset(20.0, 1015 / 1024)},
    512: {2: Inset(4.0, 897 / 1024), 3: Inset(7.0, 992 / 1024), 4: Inset(16.0, 1017 / 1024)},
}
_KEYS: _Table = {
    32: {2: Inset(11.0), 3: Inset(32.0)},
    64: {2: Inset(8.0), 3: Inset(19.0), 4: Inset(64.0)},
    128: {2: Inset(6.5), 3: Inset(13.0), 4: Inset(32.0)},
    256: {2: Inset(6.0), 3: Inset(11.0), 4: Inset(26.0)},
}


def inset_of_values(bits: int, elements: int) -> Inset:
    """Returns the inset of values with groups of `elements` elements: that of the largest group not above it."""
    return _inset_of(_VALUES, bits, elements)


def inset_of_keys(bits: int, elements: int) -> Inset:
    """Returns the inset of keys, as `inset_of_values`."""
    return _inset_of(_KEYS, bits, elements)


def _inset_of(table: _Table, bits: int, elements: int) -> Inset:
    known = [size for size in table if size <= elements]
    return table[max(known)].get(bits, FULL_RANGE) if known else FULL_RANGE
