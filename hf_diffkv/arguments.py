"""Argument checks shared by several packages."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from typing import Any

# least similarity, 0 to 1, at which a name may have been meant
SIMILAR = 0.6


def as_ratio(name: str, value: Any) -> float:
    """Returns `value` as a float. Raises `ValueError`, which contains `name`, unless it is above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise ValueError(f"{name}={value!r} must be a number above 0 and at most 1, for example 0.3.")
    return float(value)


def similar(given: Any, known: Iterable[str], count: int = 1) -> list[str]:
    """Returns up to `count` known names that `given` may have been meant to be, most similar first."""
    return difflib.get_close_matches(str(given), sorted(known), n=count, cutoff=SIMILAR)
