"""Methods for this library's cache: `diffkv`, `diffkv:K8V4`, `diffkv:3/0.02`, `diffkv:K6V4/K4V2+window=128`.

Without options, the configuration is that of `DiffKVConfig.for_model`. The options are:

- `KxVy`: one precision for all tokens;
- `KxVy/KxVy`: precisions of the high and the low level;
- two numbers: `alpha_high/alpha_low`;
- `lossless`, `paper`: configurations of that name;
- `quality`, `balanced`, `small`: presets, which stand for ratios if the model's heads have been measured;
- `target_ratio=0.2`: another ratio;
- `config=NAME`: a configuration in a folder or on the Hub, for example from `hf-diffkv calibrate`;
- `field=value`: a field of `DiffKVConfig`, with a JSON value.

Other policies on the same pages are methods too, such as `leankv:high_cut=0.3`. They take the options of the policy and
of `diffkv`. By default, they keep no exact sinks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ...config import DiffKVConfig
from ...config.files import removed_field
from ...config.presets import PRESETS, one_level
from ...heads.allocation import TARGET_RATIO
from ...heads.lookup import queries_of
from ...policy import POLICIES
from ...precision import PRECISION_NAME, Precision
from ..errors import EvaluationError, meant, unknown
from . import method
from .base import HeldBytes, Method, using_attention

# keyword argument of `for_model` that is not a field of `DiffKVConfig`
PRESET = "preset"
DEFAULT_POLICY = "diffkv"
CONFIG_FIELDS = {field.name for field in dataclasses.fields(DiffKVConfig)}
DIFFKV_OPTIONS = CONFIG_FIELDS | {PRESET, TARGET_RATIO}
DECIMAL = r"\d+(?:\.\d+)?"


class DiffKVMethod(Method):
    """Method that uses a `DiffKVCache`.

    Args:
        fields: fields of `DiffKVConfig` that override the choice of `for_model`, or of `base`.
        base: name of a class method of `DiffKVConfig` to start from instead of `for_model`.
    """

    batches = True

    def __init__(self, fields: dict[str, Any], base: str | None = None) -> None:
        self.fields, self.base = fields, base
        # reports invalid fields before a model is loaded
        self.config_for(None)

    def config_for(self, model: Any) -> DiffKVConfig:
        """Returns the configuration of caches for a model or its configuration; None only checks the fields."""
        if self.base is not None:
            return getattr(DiffKVConfig, self.base)(**self.fields)
        if model is None:
            known = {name: value for name, value in self.fields.items() if name not in (PRESET, TARGET_RATIO)}
            return DiffKVConfig.from_dict(known)
        return DiffKVConfig.for_model(model, **self.fields)

    def new_cache(self, model: Any) -> Any:
        from ...cache.diffkv_cache import DiffKVCache

        return DiffKVCache(model, self.config_for(model))

    def decided_by(self, model: Any) -> dict[str, Any]:
        """Returns digests of the configuration, which depends on measurements, and of the measured queries."""
        fields = json.dumps(self.config_for(model).to_dict(), sort_keys=True).encode()
        queries = queries_of(model)
        return {"config": _digest(fields), "queries": None if queries is None else _digest(queries.read_bytes())}

    def branch(self, cache: Any) -> Any:
        return cache.fork(1)[0]

    def held(self, cache: Any) -> HeldBytes:
        report = cache.memory()
        return HeldBytes(report.bytes, report.payload_bytes, levels=report.tokens)

    def attached(self, model: Any, cache: Any) -> AbstractContextManager[None]:
        return using_attention(model, "diffkv")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def parse_options(options: list[str]) -> tuple[dict[str, Any], str | None]:
    """Parses options into fields of `DiffKVConfig` and the name of the class method to start from."""
    fields: dict[str, Any] = {}
    base = None
    for option in options:
        levels = re.fullmatch(rf"({PRECISION_NAME.pattern})/({PRECISION_NAME.pattern})", option)
        alphas = re.fullmatch(rf"({DECIMAL})/({DECIMAL})", option)
        if option in ("lossless", "paper"):
            base = option
        elif option in PRESETS:
            fields[PRESET] = option
        elif PRECISION_NAME.fullmatch(option):
            fields |= one_level(Precision.parse(option))
        elif levels:
            fields |= {"high": Precision.parse(levels[1]), "low": Precision.parse(levels[6])}
        elif alphas:
            fields |= {"alpha_high": float(alphas[1]), "alpha_low": float(alphas[2])}
        elif option.startswith("config="):
            fields |= _saved(option.partition("=")[2])
        elif "=" in option:
            name, _, value = option.partition("=")
            if name not in DIFFKV_OPTIONS and removed_field([name]) is None:
                raise unknown("option of a diffkv method", name, DIFFKV_OPTIONS)
            fields[name] = parse_value(value)
        else:
            of_what = (
                f"none of K8V4, K8V4/K4V2, 1/0 (alpha_high/alpha_low), lossless, paper, {', '.join(PRESETS)}, "
                "config=NAME, or field=value of DiffKVConfig."
            )
            close = meant(option, ("lossless", "paper", *PRESETS))
            raise EvaluationError(f"option {option!r} of a diffkv method is {of_what} {close}".rstrip())
    return fields, base


def _saved(name: str) -> dict[str, Any]:
    try:
        return DiffKVConfig.from_pretrained(name).to_dict()
    except OSError as error:
        raise EvaluationError(str(error)) from error


def parse_value(text: str) -> Any:
    """Parses the value of an option as a precision or JSON; otherwise returns the text."""
    if PRECISION_NAME.fullmatch(text):
        return Precision.parse(text)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@method(DEFAULT_POLICY)
def diffkv(options: list[str]) -> Method:
    return DiffKVMethod(*parse_options(options))


def _build(name: str, options: list[str]) -> Method:
    known = {field.name for field in dataclasses.fields(POLICIES[name])}
    for option in options:
        field = option.partition("=")[0]
        if "=" in option and field not in known | CONFIG_FIELDS:
            raise unknown(f"option of {name}", field, known | CONFIG_FIELDS)
    mine = [option for option in options if option.partition("=")[0] in known]
    fields, base = parse_options([option for option in options if option not in mine])
    split = (option.partition("=") for option in mine)
    chosen = {field: parse_value(value) for field, _, value in split}
    return DiffKVMethod({"sinks": 0, **fields, "policy": name, "policy_options": chosen}, base)


for _name in POLICIES:
    if _name != DEFAULT_POLICY:
        method(_name)(partial(_build, _name))
