"""Insets: how far inside the range of rotated values their codes end (not in the paper).

The elements of a rotated value are roughly normally distributed, so few are near the ends of their range. Codes that
stop short of the ends lose less, but shrink values on average, which a sum over many tokens would not even out. Values
are divided by that shrinkage before they are quantised. With 64 elements, the mean square error is then .65 times that
of codes spanning the range at 2 bits, .87 at 3 bits and .96 at 4; with 128 elements, .56, .79 and .93.

Keys are not inset: a few keys with a large range decide what is found, and they would lose accuracy
(docs/notes/quality-studies.md, which also shows how the table was made).
"""

from __future__ import annotations

from typing import NamedTuple


class Inset(NamedTuple):
    """How values with a given number of bits are quantised.

    Attributes:
        parts: parts in a group's range, one of which is left to the outermost code at each end; 0 leaves none.
        shrinkage: scalar product of a value with its codes, over that with itself; values are divided by it.
    """

    parts: float
    shrinkage: float


FULL_RANGE = Inset(0.0, 1.0)
# by elements per group and bits; all numbers are exact in float32
_INSETS = {
    16: {2: Inset(10.5, 941 / 1024), 3: Inset(48.0, 1009 / 1024)},
    32: {2: Inset(7.5, 926 / 1024), 3: Inset(24.0, 1000 / 1024)},
    64: {2: Inset(6.0, 919 / 1024), 3: Inset(14.0, 992 / 1024), 4: Inset(48.0, 1016 / 1024)},
    96: {2: Inset(5.5, 920 / 1024), 3: Inset(12.0, 993 / 1024), 4: Inset(32.0, 1015 / 1024)},
    128: {2: Inset(5.0, 909 / 1024), 3: Inset(10.0, 989 / 1024), 4: Inset(24.0, 1013 / 1024)},
    192: {2: Inset(4.5, 897 / 1024), 3: Inset(9.0, 991 / 1024), 4: Inset(20.0, 1014 / 1024)},
    256: {2: Inset(4.5, 910 / 1024), 3: Inset(8.0, 989 / 1024), 4: Inset(20.0, 1015 / 1024)},
    512: {2: Inset(4.0, 897 / 1024), 3: Inset(7.0, 992 / 1024), 4: Inset(16.0, 1017 / 1024)},
}


def inset_of(bits: int, elements: int) -> Inset:
    """Returns the inset of groups of `elements` elements at `bits` bits, from the largest listed size up to that."""
    known = [size for size in _INSETS if size <= elements]
    return _INSETS[max(known)].get(bits, FULL_RANGE) if known else FULL_RANGE
