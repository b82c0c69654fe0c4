"""Converts and checks the values of a configuration's fields."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from typing import Any, Union

from ..precision import Precision, as_precision, is_integer

Threshold = Union[float, tuple[float, ...], tuple[tuple[float, ...], ...]]
HeadPrecisions = tuple[Union[tuple[Precision, ...], None], ...]
# factors by unit in lower case
UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
# a smaller number without a unit is assumed to be missing it
LEAST_WITHOUT_UNIT = 1_000_000


class Options(dict):
    """Immutable options by name."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple:
        return Options, (dict(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a configuration's options cannot be changed; make a new one with dataclasses.replace.")

    __setitem__ = __delitem__ = __ior__ = clear = _refuse  # type: ignore[assignment]
    pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]


def as_threshold(name: str, value: Any) -> Threshold:
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{name} is empty; give one number, one per layer, or one per layer and head.")
        nested = [isinstance(entry, (list, tuple)) for entry in value]
        if any(nested) and not all(nested):
            raise ValueError(f"{name} mixes numbers and lists; give one number per layer, or one list per layer.")
        entries: tuple[Any, ...] = tuple(as_threshold(name, entry) for entry in value)
        if any(isinstance(inner, tuple) for entry in entries if isinstance(entry, tuple) for inner in entry):
            raise ValueError(f"{name} is nested too deeply; at most one list of heads per layer.")
        if all(nested) and len({len(entry) for entry in entries}) > 1:
            raise ValueError(f"{name} has layers with different numbers of heads.")
        return entries
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value) or value < 0:
        raise ValueError(f"{name}={value!r} must be a number of at least 0, or lists of such numbers.")
    return float(value)


def as_head_precisions(value: Any) -> HeadPrecisions | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(
            f"head_precisions={value!r} must have an entry for each compressed layer: a list with the precision of "
            "each KV head, or None."
        )
    layers: list[tuple[Precision, ...] | None] = []
    for index, layer in enumerate(value):
        if layer is not None and (not isinstance(layer, (list, tuple)) or not layer):
            raise ValueError(f"head_precisions[{index}]={layer!r} must list the precision of each KV head, or be None.")
        name = f"head_precisions[{index}]"
        # a layer without any precision is equivalent to None
        if layer is None or all(one is None for one in layer):
            layers.append(None)
            continue
        if None in layer:
            raise ValueError(
                f"{name} has heads with a precision and heads without one: mixing precisions and thresholds within one "
                "layer is no longer supported; give every head of the layer a precision, or make the entry None and "
                "give alpha_high and alpha_low a number for each head."
            )
        layers.append(tuple(as_precision(name, one) for one in layer))
        names = sorted({precision.full_name for precision in layers[-1] or ()})
        if len(names) > 2:
            raise ValueError(f"{name} has {len(names)} precisions ({', '.join(names)}); a layer can have two.")
    return tuple(layers)


def paired(low: Any, high: Any) -> list[tuple[float, float]] | None:
    """Returns the pairs of two `Threshold`s for the same layer and head; None if their shapes do not match."""
    if not isinstance(low, tuple) and not isinstance(high, tuple):
        return [(low, high)]
    if isinstance(low, tuple) and isinstance(high, tuple) and len(low) != len(high):
        return None
    length = len(low) if isinstance(low, tuple) else len(high)
    lows = low if isinstance(low, tuple) else (low,) * length
    highs = high if isinstance(high, tuple) else (high,) * length
    pairs: list[tuple[float, float]] = []
    for a, b in zip(lows, highs):
        inner = paired(a, b)
        if inner is None:
            return None
        pairs += inner
    return pairs


def as_count(name: str, value: Any, least: int = 1) -> int:
    if not is_integer(value) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
    return int(value)


def as_bytes(name: str, value: Any) -> int | str:
    """Converts a number of bytes, or a text for `bytes_in`; a share such as "80%" stays a text. Raises `ValueError`."""
    if not isinstance(value, str):
        return as_count(name, value)
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"{name}={value!r} is not a share of the free memory; give more than 0% and at most 100%.")
        return f"{share[1]}%"
    try:
        return bytes_in(value)
    except ValueError as error:
        raise ValueError(f"{name}={error}") from error


def bytes_in(text: str, least: int = 1) -> int:
    """Parses a size such as 24GB, 512MiB or 1000000 to bytes. Raises `ValueError`, which begins with the text.

    Args:
        least: 1, or 0 if a size of zero is allowed.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is not a size; write 24GB, 512MiB or a number of bytes.")
    size = int(float(match[1]) * UNITS[match[2].lower()])
    if size < least:
        raise ValueError(f"{text!r} is less than a byte; give at least one.")
    if not match[2] and 0 < size < LEAST_WITHOUT_UNIT:
        raise ValueError(f"{text!r} is {size} bytes; write {match[1]}GB, or {size}B if you mean so few.")
    return size


def checked_options(policy: Any, options: Any) -> Options:
    if not isinstance(policy, str):
        raise ValueError(f"policy={policy!r} must be the name of a policy.")
    if not isinstance(options, Mapping):
        raise ValueError(f"policy_options={options!r} must be a dictionary of options by name.")
    # imported here, as policies need PyTorch, which importing this module must not load
    from ..policy import make_policy

    made = make_policy(policy, options)
    return Options({name: getattr(made, name) for name in options})


def payload_bits(precision: Precision) -> int:
    return precision.k_bits + precision.v_bits
