"""Every configuration of this library: `diffkv`, `diffkv:K8V4`, `diffkv:3/0.02`, `diffkv:K6V4/K4V2+window=128`.

Without options it is what `DiffKVConfig.for_model` takes. `KxVy` alone stores every token at one precision; `KxVy/KxVy`
are the high and the low level; two numbers are `alpha_high/alpha_low`; `lossless` and `paper` are configurations of
that name; the presets `quality`, `balanced` and `small` are ratios for a model whose heads were measured, and
`target_ratio=0.2` is any other; `config=NAME` is one saved in a folder or on the Hub, by `hf-diffkv calibrate` say;
anything else is a field of `DiffKVConfig` as field=value, the value as in JSON.

Other policies, on the same pages, are methods too: `leankv:high_cut=0.3`. Their options are those of the policy and of
`diffkv`. No sinks are exact beside the window.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...compat import attention_of
from ...config import DiffKVConfig
from ...config.allocation import TARGET_RATIO
from ...config.found import queries_of
from ...config.presets import PRESETS
from ...policy import POLICIES
from ...precision import PRECISION_NAME, Precision
from ..errors import EvaluationError, meant, unknown
from . import method
from .base import HeldBytes, Method

# keys among the fields that `for_model` takes beside those of `DiffKVConfig`
PRESET = "preset"
DEFAULT_POLICY = "diffkv"
CONFIG_FIELDS = {field.name for field in dataclasses.fields(DiffKVConfig)}
DECIMAL = r"\d+(?:\.\d+)?"


class DiffKVMethod(Method):
    """A `DiffKVCache`.

    Args:
        fields: of `DiffKVConfig`; on top of what `for_model` chooses, unless `base` is given.
        base: name of a class method of `DiffKVConfig` to start from.
    """

    batches = True
    stores_padding = False

    def __init__(self, fields: dict[str, Any], base: str | None = None) -> None:
        self.fields, self.base = fields, base
        # what is wrong with the fields is said before a model is loaded
        self.config_for(None)

    def config_for(self, model: Any) -> DiffKVConfig:
        """The configuration of the caches of a model or its configuration; without any only the fields are checked."""
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
        """Digests of the configuration, which depends on what was measured, and of the measured queries."""
        fields = json.dumps(self.config_for(model).to_dict(), sort_keys=True).encode()
        queries = queries_of(model)
        return {"config": _digest(fields), "queries": None if queries is None else _digest(queries.read_bytes())}

    def branch(self, cache: Any) -> Any:
        return cache.fork(1)[0]

    def held(self, cache: Any) -> HeldBytes:
        report = cache.memory()
        return HeldBytes(report.bytes, report.payload_bytes, levels=report.tokens)

    @contextmanager
    def attached(self, model: Any, cache: Any) -> Iterator[None]:
        before = attention_of(model.config)
        model.set_attn_implementation("diffkv")
        try:
            yield
        finally:
            if before is not None:
                model.set_attn_implementation(before)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def parse_options(options: list[str]) -> tuple[dict[str, Any], str | None]:
    """Fields of `DiffKVConfig` and the name of what to start from."""
    fields: dict[str, Any] = {}
    base = None
    for option in options:
        levels = re.fullmatch(rf"({PRECISION_NAME.pattern})/({PRECISION_NAME.pattern})", option)
        alphas = re.fullmatch(rf"({DECIMAL})/({DECIMAL})", option)
        if option in ("lossless", "paper") and hasattr(DiffKVConfig, option):
            base = option
        elif option in PRESETS:
            fields[PRESET] = option
        elif PRECISION_NAME.fullmatch(option):
            precision = Precision.parse(option)
            fields |= {"high": precision, "low": precision, "alpha_high": 0.0, "alpha_low": 0.0}
        elif levels:
            fields |= {"high": Precision.parse(levels[1]), "low": Precision.parse(levels[6])}
        elif alphas:
            fields |= {"alpha_high": float(alphas[1]), "alpha_low": float(alphas[2])}
        elif option.startswith("config="):
            fields |= _saved(option.partition("=")[2])
        elif "=" in option:
            name, _, value = option.partition("=")
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
    """A value of an option: a precision, JSON, or the text as it is."""
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
