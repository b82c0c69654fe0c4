"""`until_full`: the precision of all tokens until `max_bytes` is full; then heads are lowered to their final one."""

from __future__ import annotations

import math
from typing import Any, Protocol

from ..precision import Precision, as_precision
from .checks import HeadPrecisions, Threshold, paired, payload_bits

AUTO = "auto"
# 8 bits are as good as exact, and quantising them again adds at most 1.5 % to the squared error of 5 bits
PRECISE = Precision(8, 8)


class BudgetFields(Protocol):
    """Fields of a configuration (`DiffKVConfig`) that determine precisions, and its budget."""

    @property
    def policy(self) -> str: ...
    @property
    def high(self) -> Precision: ...
    @property
    def low(self) -> Precision: ...
    @property
    def alpha_high(self) -> Threshold: ...
    @property
    def alpha_low(self) -> Threshold: ...
    @property
    def head_precisions(self) -> HeadPrecisions | None: ...
    @property
    def max_bytes(self) -> int | str | None: ...
    @property
    def until_full(self) -> Precision | str | None: ...


def as_until_full(value: Any) -> Precision | str | None:
    """Returns a precision, "auto" or None. Raises `ValueError` for anything else."""
    return value if value is None or value == AUTO else as_precision("until_full", value)


def only_precision(config: BudgetFields) -> Precision | None:
    """Returns the precision of all tokens of all heads, whatever attention they get; None if there is no such one."""
    if config.policy != "diffkv":
        return None
    layers = (None,) if config.head_precisions is None else config.head_precisions
    found = {precision for layer in layers for precision in layer or ()}
    if None in layers:
        for low, high in paired(config.alpha_low, config.alpha_high) or ():
            if low > 0 or (0 < high < math.inf and config.high != config.low):
                return None
            found.add(config.low if high > 0 else config.high)
    return found.pop() if len(found) == 1 else None


def check_until_full(config: BudgetFields) -> None:
    """Raises `ValueError` if `until_full` is a precision that cannot be used."""
    precise = config.until_full
    if not isinstance(precise, Precision):
        return
    if config.max_bytes is None:
        raise ValueError("until_full needs max_bytes, the budget that may become full; set max_bytes as well.")
    final = only_precision(config)
    if final is None:
        raise ValueError(
            f"until_full={precise.name} needs one final precision for all tokens and heads; give high and low the "
            "same precision without alpha_low and head_precisions, or leave until_full out."
        )
    if payload_bits(final) >= payload_bits(precise):
        raise ValueError(
            f"until_full={precise.name} must need more bits than the final precision {final.name}; raise until_full, "
            "or lower high and low."
        )


def precise_of(config: BudgetFields) -> Precision | None:
    """Returns the precision of tokens until `max_bytes` is full; None if tokens are chosen to stay within it."""
    if config.max_bytes is None or config.until_full is None:
        return None
    if isinstance(config.until_full, Precision):
        return config.until_full
    final = only_precision(config)
    return None if final is None or payload_bits(final) >= payload_bits(PRECISE) else PRECISE
