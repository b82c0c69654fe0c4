"""Rules that turn significance into levels: one file each, found by itself (`base.Policy` says what it needs)."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from .base import (
    ForwardRows,
    Levels,
    Policy,
    StepRows,
    Tokens,
    levels_between,
    mean_significance,
    relative_thresholds,
)


def _find_policies() -> dict[str, type[Policy]]:
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, Policy) and value is not Policy:
                found[info.name] = value
    return found


POLICIES = _find_policies()


def make_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """The policy called `name` with the given options.

    Raises:
        ValueError: there is no such policy or option, or a value is outside its range.
    """
    if name not in POLICIES:
        raise ValueError(f"policy={name!r} is unknown{_meant(name, POLICIES)}; use one of {sorted(POLICIES)}.")
    known = [field.name for field in dataclasses.fields(POLICIES[name])]
    for given in options:
        if given not in known:
            choice = f"its options are {known}" if known else "it has none"
            raise ValueError(f"policy_options: {name!r} has no option {given!r}{_meant(given, known)}; {choice}.")
    return POLICIES[name](**options)


def _meant(given: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


__all__ = [
    "POLICIES",
    "Levels",
    "Policy",
    "ForwardRows",
    "StepRows",
    "Tokens",
    "levels_between",
    "make_policy",
    "mean_significance",
    "relative_thresholds",
]
