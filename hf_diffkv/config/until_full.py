"""`until_full`: the precision of all tokens until `max_bytes` is full; then heads are lowered to their final one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Union

from ..precision import Precision, as_precision
from .checks import HeadPrecisions, Threshold, paired, payload_bits

AUTO = "auto"
# 8 bits are as good as exact, and quantising them again adds at most 1.5 % to the squared error of 5 bits
PRECISE = Precision(8, 8)
# steps from K8V8 to fewer bits, so that intermediate loads have intermediate precisions (docs/notes/quality-studies.md)
MIDDLES = (Precision(6, 5), Precision(4, 4))
# final precisions of a layer's heads; only one if they share it
Finals = tuple[Precision, ...]


class BudgetFields(Protocol):
    """Fields of a configuration (`DiffKVConfig`) that determine its precisions and budget."""

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


@dataclass(frozen=True)
class Rungs:
    """Precisions of a layer that is precise until the budget is full.

    Attributes:
        high: last precision before `low`, and the final one of heads that never get `low`.
        low: final precision of the other heads; if there are none, taken from other layers with the same `high`.
        alpha_high: infinite for heads that end at `low`, 0 for the others; one number for all heads, or one per head.
    """

    first: Precision
    high: Precision
    low: Precision
    alpha_high: Union[float, tuple[float, ...]]


def as_until_full(value: Any) -> Precision | str | None:
    """Returns a precision, "auto" or None. Raises `ValueError` for anything else."""
    return value if value is None or value == AUTO else as_precision("until_full", value)


def smaller_first(precisions: Iterable[Precision]) -> list[Precision]:
    """Sorts precisions by increasing number of bits."""
    return sorted(precisions, key=lambda precision: (payload_bits(precision), dataclasses.astuple(precision)))


def joined_names(precisions: Iterable[Precision]) -> str:
    """Returns the names of the distinct precisions, from most to fewest bits."""
    return "/".join(precision.full_name for precision in reversed(smaller_first(set(precisions))))


def final_precisions(config: BudgetFields) -> tuple[Finals, ...] | None:
    """Returns the final precisions by layer, one entry if all layers are alike; None if tokens are chosen."""
    if config.policy != "diffkv":
        return None
    of_layers = (config.head_precisions, config.alpha_high, config.alpha_low)
    count = min((len(given) for given in of_layers if isinstance(given, tuple)), default=1)
    found = [_finals_of(config, index) for index in range(count)]
    return None if None in found else tuple(finals for finals in found if finals is not None)


def _finals_of(config: BudgetFields, index: int) -> Finals | None:
    chosen = None if config.head_precisions is None else config.head_precisions[index]
    if chosen is None:
        low, high = (a[index] if isinstance(a, tuple) else a for a in (config.alpha_low, config.alpha_high))
        alphas = paired(low, high) or []
        if any(a > 0 or (0 < b < math.inf and config.high != config.low) for a, b in alphas):
            return None
        chosen = tuple(config.low if b > 0 else config.high for _, b in alphas)
    return chosen[:1] if len(set(chosen)) == 1 else chosen


def _first_of(config: BudgetFields, finals: Finals) -> Precision:
    """Returns the precision that a layer's tokens start with: K8V8, or the one that `until_full` names.

    If it names one, layers with two final precisions start at the higher of them.
    """
    highest = smaller_first(set(finals))[-1]
    if not isinstance(config.until_full, Precision):
        return max(highest, PRECISE, key=payload_bits)
    if len(finals) > 1:
        return highest
    return max(highest, config.until_full, key=payload_bits)


def check_until_full(config: BudgetFields) -> None:
    """Raises `ValueError` if `until_full` is a precision that cannot be used."""
    precise = config.until_full
    if not isinstance(precise, Precision):
        return
    if config.max_bytes is None:
        raise ValueError("until_full needs max_bytes, the budget to be filled; set max_bytes as well.")
    layers = final_precisions(config)
    if layers is None:
        raise ValueError(
            f"until_full={precise.name} needs a final precision for all tokens of a head; give head_precisions, set "
            "high and low to the same precision without alpha_low, or leave until_full out."
        )
    for finals in layers:
        first = _first_of(config, finals)
        if first == precise or len(finals) > 1 and precise == PRECISE:
            # naming K8V8 keeps the higher one, as "auto" does
            continue
        if len(finals) > 1:
            raise ValueError(
                f"until_full={precise.name}: a layer whose heads have two final precisions begins with the higher one, "
                f"here {first.name}; leave until_full out, or use it with one final precision per layer."
            )
        raise ValueError(
            f"until_full={precise.name} must need more bits than the final precision {first.name}; raise until_full, "
            "or lower high and low."
        )


def precise_of(config: BudgetFields) -> Precision | None:
    """Returns the precision of tokens until `max_bytes` is full; None if tokens are chosen to stay within it.

    If `until_full` names a precision, layers whose heads have two final precisions start at the higher one instead.
    """
    if config.max_bytes is None or config.until_full is None:
        return None
    if isinstance(config.until_full, Precision):
        return config.until_full
    layers = final_precisions(config) or ()
    return PRECISE if any({*finals} != {_first_of(config, finals)} for finals in layers) else None


def rungs_of(config: BudgetFields, index: int) -> Rungs:
    """Returns the rungs of one compressed layer; `precise_of` must not be None."""
    layers = final_precisions(config) or ()
    own = _own_rungs(config, layers[index if len(layers) > 1 else 0])
    if own.low != own.high:
        return own
    others = (_own_rungs(config, finals) for finals in layers)
    partner = next((other.low for other in others if other.high == own.high != other.low), own.low)
    return dataclasses.replace(own, low=partner)


def _own_rungs(config: BudgetFields, finals: Finals) -> Rungs:
    """Returns a layer's rungs from its final precisions alone; `low` is `high` if nothing is lowered."""
    first, (low, *more) = _first_of(config, finals), smaller_first(set(finals))
    if more:
        return Rungs(first, more[-1], low, tuple(math.inf if each == low else 0.0 for each in finals))
    if low == first:
        return Rungs(first, first, first, 0.0)
    middles = () if isinstance(config.until_full, Precision) else _between(first, low)
    return Rungs(first, (first, *middles)[-1], low, math.inf)


def precisions_in_turn(config: BudgetFields) -> tuple[Precision, ...]:
    """Returns the precisions of a layer's tokens (`DiffKVConfig.of_layer`), from first to last, at least two."""
    first = config.until_full
    if not isinstance(first, Precision) or first == config.high:
        return config.high, config.low
    return first, *_between(first, config.high), config.high, config.low


def _between(first: Precision, last: Precision) -> tuple[Precision, ...]:
    """Returns the entries of `MIDDLES` through which tokens go from `first` to `last`."""
    precise, few = MIDDLES
    if not (last.k_bits < precise.k_bits < first.k_bits and last.v_bits < precise.v_bits):
        return ()
    return (precise, few) if last.k_bits < few.k_bits and last.v_bits <= few.v_bits else (precise,)
