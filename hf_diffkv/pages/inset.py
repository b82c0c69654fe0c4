"""Insets: by how much the codes of rotated values end before their range does (ours).

The elements of a rotated value are about normally distributed, so few are near the ends of their range. Codes that end
a part of the range before it lose less, but shrink values on average, which a sum over many tokens would not even out.
Values are divided by that shrinkage before they are quantised. The mean square error that is left is .65 of that of
codes from end to end for 2 bits and 64 elements, .87 for 3 bits and .96 for 4; for 128 elements .56, .79 and .93.

Keys are not inset: few large ones decide what is found, and those would lose (docs/notes/quality-studies.md, which also
has how the table was made).
"""

from __future__ import annotations

from typing import NamedTuple


class Inset(NamedTuple):
    """How values of some bits are quantised.

    Attributes:
        parts: parts of the range of a group, of which one at each end is left to the outermost codes; 0 leaves none.
        shrinkage: scalar product of a value with its codes over that with itself; values are divided by it.
    """

    parts: float
    shrinkage: float


FULL_RANGE = Inset(0.0, 1.0)
# by elements of a group and bits; all numbers are exact in float32
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
    """Returns the inset of groups of `elements` elements at `bits` bits: that of the largest group not above it."""
    known = [size for size in _INSETS if size <= elements]
    return _INSETS[max(known)].get(bits, FULL_RANGE) if known else FULL_RANGE
