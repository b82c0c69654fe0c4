"""Whether names that are private to Transformers are still what the code here relies on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

# owner, name, parameters without `self`
PrivateName = tuple[Any, str, tuple[str, ...]]


def changed(expected: Iterable[PrivateName]) -> list[str]:
    """Those that are not there or take other parameters, as "Owner.name"."""
    return [
        f"{owner.__name__}.{name}"
        for owner, name, parameters in expected
        if parameters_of(getattr(owner, name, None)) != parameters
    ]


def parameters_of(function: Any) -> tuple[str, ...] | None:
    """Names of a function's parameters but `self`; None where there is no such function."""
    if function is None:
        return None
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
