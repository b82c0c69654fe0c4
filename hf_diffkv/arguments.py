"""Checks of arguments that several packages share."""

from __future__ import annotations

import numbers
from typing import Any


def as_ratio(name: str, value: Any) -> float:
    """Returns `value` as a float. Raises `ValueError`, which contains `name`, unless it is above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise ValueError(f"{name}={value!r} must be a number above 0 and at most 1, for example 0.3.")
    return float(value)
