"""Policies, which turn significance into levels. They extend `base.Policy`; `register_policy` adds one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..arguments import similar
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
from .diffkv import DiffKV
from .leankv import LeanKV

POLICIES: dict[str, type[Policy]] = {"diffkv": DiffKV, "leankv": LeanKV}
# policies of releases up to 0.1
REMOVED = ("h2o", "pyramid", "random", "share", "snapkv", "streaming")


def register_policy(name: str, policy: type[Policy]) -> None:
    """Registers `policy` in this process, so that `DiffKVConfig(policy=name)` finds it.

    Args:
        name: name of the policy. Registering the same class again under its name does nothing.
        policy: frozen dataclass that extends `Policy`; its fields are the policy's options.

    Raises:
        ValueError: `policy` does not extend `Policy`, or the name belongs to another policy.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(f"policy={policy!r} must be a class that extends hf_diffkv.policy.Policy.")
    if POLICIES.get(name, policy) is not policy:
        raise ValueError(f"name={name!r} is the name of another policy; choose a new one.")
    POLICIES[name] = policy


def make_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """Creates the policy called `name` with the given options.

    Raises:
        ValueError: there is no such policy or option, or a value is outside its range.
    """
    if name not in POLICIES:
        raise ValueError(_unknown(name))
    known = [field.name for field in dataclasses.fields(POLICIES[name])]
    for given in options:
        if given not in known:
            choice = f"its options are {known}" if known else "it has none"
            raise ValueError(f"policy_options: {name!r} has no option {given!r}{_meant(given, known)}; {choice}.")
    return POLICIES[name](**options)


def _unknown(name: str) -> str:
    if name in REMOVED:
        return (
            f"policy={name!r} was removed; kvpress has methods that drop tokens, and examples/own_policy.py shows how "
            "to write your own policy."
        )
    return (
        f"policy={name!r} is unknown{_meant(name, POLICIES)}; use one of {sorted(POLICIES)}, or register your own with "
        "hf_diffkv.policy.register_policy first."
    )


def _meant(given: Any, known: Any) -> str:
    close = similar(given, known)
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
    "register_policy",
    "relative_thresholds",
]
