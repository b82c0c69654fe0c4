"""Other methods of the field on this library's pages, a method for each policy: `snapkv:budget=0.3`, `leankv`.

Options are those of the policy and of `diffkv` methods. A policy that only keeps or drops tokens keeps them in the
model's dtype unless a precision is given, as its paper does. No first tokens are exact beside those of the policy.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from ...config import DiffKVConfig, Precision
from ...policy import POLICIES
from ..errors import unknown
from . import METHODS
from .base import Method
from .diffkv import DiffKVMethod, parse_options, parse_value

DEFAULT_POLICY = "diffkv"
CONFIG_FIELDS = {field.name for field in dataclasses.fields(DiffKVConfig)}


def _build(name: str, options: list[str]) -> Method:
    policy = POLICIES[name]
    known = {field.name for field in dataclasses.fields(policy)}
    for option in options:
        field = option.partition("=")[0]
        if "=" in option and field not in known | CONFIG_FIELDS:
            raise unknown(f"option of {name}", field, known | CONFIG_FIELDS)
    mine = [option for option in options if option.partition("=")[0] in known]
    fields, base = parse_options([option for option in options if option not in mine])
    if not policy.two_levels and "high" not in fields:
        fields |= {"high": Precision(16, 16), "low": Precision(16, 16)}
    chosen: dict[str, Any] = {}
    for option in mine:
        field, _, value = option.partition("=")
        chosen[field] = parse_value(value)
    return DiffKVMethod({"sinks": 0, **fields, "policy": name, "policy_options": chosen}, base)


for _name in POLICIES:
    if _name != DEFAULT_POLICY:
        METHODS.add(_name)(partial(_build, _name))
