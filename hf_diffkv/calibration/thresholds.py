"""Searches for thresholds: the paper's sweep, then single layers if that saves more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import Threshold

# DiffKV, SOSP 2025: alpha_high over integers with alpha_low = 0 first, then alpha_low
ALPHA_HIGH = (1.0, 2.0, 3.0, 4.0, 5.0)
ALPHA_LOW = (0.02, 0.04, 0.06, 0.08, 0.1)

# a smaller loss is noise
NO_LOSS = 1e-6


@dataclass(frozen=True)
class Thresholds:
    """A pair of thresholds, each one number or one per compressed layer."""

    alpha_high: Threshold
    alpha_low: Threshold

    def method(self, base: str) -> str:
        """Returns the name of the method with these thresholds and the other options of `base`."""
        values = {"alpha_high": self.alpha_high, "alpha_low": self.alpha_low}
        options = "+".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        return f"{base}{'+' if ':' in base else ':'}{options}"


@dataclass(frozen=True)
class Candidate:
    """Measured thresholds.

    Attributes:
        bytes: measured size of the cache, summed over the documents; None if a document failed.
        ratio: `bytes` over the size of a dense cache with the same number of tokens.
        loss: difference from the dense cache in the calibration metric; positive is worse.
    """

    thresholds: Thresholds
    bytes: int | None = None
    ratio: float | None = None
    loss: float | None = None
    error: str | None = None

    def to_dict(self, loss_name: str) -> dict[str, Any]:
        """Returns plain values for JSON."""
        values = {"alpha_high": self.thresholds.alpha_high, "alpha_low": self.thresholds.alpha_low}
        if self.error is not None:
            return {**values, "error": self.error}
        return {**values, "bytes": self.bytes, "ratio": self.ratio, loss_name: self.loss}


def cheapest(candidates: Iterable[Candidate], limit: float) -> Candidate | None:
    """Returns the candidate with the lowest ratio, then the lowest loss, among losses up to `limit`, or None."""
    good = [each for each in candidates if each.error is None and each.loss <= limit]
    return min(good, key=lambda each: (each.ratio, each.loss), default=None)


def closest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Returns the candidate with the lowest loss; None if all failed."""
    return min((each for each in candidates if each.error is None), key=lambda each: each.loss, default=None)


def table(candidates: Iterable[Candidate], limit: float, loss_title: str) -> str:
    """Formats all candidates as a Markdown table, largest first."""
    candidates = list(candidates)
    chosen = cheapest(candidates, limit)
    lines = [["alpha_high", "alpha_low", "real bytes", loss_title, ""], ["---"] * 5]
    for each in sorted(candidates, key=lambda each: (each.ratio is None, -(each.ratio or 0.0))):
        pair = [_format(each.thresholds.alpha_high), _format(each.thresholds.alpha_low)]
        if each.error is not None:
            lines.append([*pair, "-", "-", f"failed: {each.error}"])
            continue
        verdict = "chosen" if each is chosen else "" if each.loss <= limit else "too much"
        lines.append([*pair, f"{each.ratio:.1%}", f"{each.loss:.4f}", verdict])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _format(threshold: Threshold) -> str:
    if not isinstance(threshold, tuple):
        return f"{threshold:g}"
    low, high = min(threshold), max(threshold)
    raised = [str(layer) for layer, value in enumerate(threshold) if value > low]
    where = f"layer {raised[0]}" if len(raised) == 1 else f"{len(raised)} of {len(threshold)} layers"
    return f"{low:g}, {high:g} in {where}"


# function that measures thresholds and returns candidates in order
Measure = Callable[[Sequence[Thresholds]], list[Candidate]]


@dataclass(frozen=True)
class Grid:
    """Values to try, from the most careful to the cheapest."""

    alpha_high: tuple[float, ...] = ALPHA_HIGH
    alpha_low: tuple[float, ...] = ALPHA_LOW


def sweep(measure: Measure, limit: float, grid: Grid, layers: int | None = None) -> list[Candidate]:
    """Searches for the cheapest thresholds that lose at most `limit`, and returns all measured candidates.

    Args:
        layers: number of the model's compressed layers, to also try single layers; None skips that.
    """
    found = measure([Thresholds(high, 0.0) for high in grid.alpha_high])
    best = cheapest(found, limit)
    if best is None:
        return found
    high = best.thresholds.alpha_high
    found += measure([Thresholds(high, low) for low in grid.alpha_low if low <= high])
    if layers is not None:
        found += _by_layer(measure, limit, cheapest(found, limit), grid, layers)
    return found


def _by_layer(measure: Measure, limit: float, start: Candidate, grid: Grid, layers: int) -> list[Candidate]:
    """Goes one step cheaper in as many layers as the limit allows, starting with the best savings per loss."""
    steps = _steps(start.thresholds, grid)
    moves = [(layer, step) for layer in range(layers) for step in steps]
    found = measure([_moved(start.thresholds, [move], layers) for move in moves])
    gains: dict[int, tuple[float, tuple[int, Thresholds]]] = {}
    for move, candidate in zip(moves, found):
        if candidate.error is None and candidate.ratio < start.ratio:
            price = max(candidate.loss - start.loss, NO_LOSS)
            gain = (start.ratio - candidate.ratio) / price
            gains[move[0]] = max(gains.get(move[0], (0.0, move)), (gain, move), key=lambda pair: pair[0])
    order = [move for _, move in sorted(gains.values(), key=lambda pair: -pair[0])]
    # bisects for the longest prefix of the order that stays within the limit
    least, most = 0, len(order)
    while least < most:
        middle = most if least == 0 and most == len(order) else (least + most + 1) // 2
        candidate = measure([_moved(start.thresholds, order[:middle], layers)])[0]
        found.append(candidate)
        if cheapest([candidate], limit) is not None:
            least = middle
        else:
            most = middle - 1
    return found


def _steps(thresholds: Thresholds, grid: Grid) -> list[Thresholds]:
    """Returns the thresholds with the next cheaper value for either one, if any."""
    high, low = thresholds.alpha_high, thresholds.alpha_low
    higher = [replace(thresholds, alpha_high=value) for value in sorted(grid.alpha_high) if value > high][:1]
    lower = [replace(thresholds, alpha_low=value) for value in sorted(grid.alpha_low) if low < value <= high][:1]
    return higher + lower


def _moved(start: Thresholds, moves: Sequence[tuple[int, Thresholds]], layers: int) -> Thresholds:
    each = [start] * layers
    for layer, step in moves:
        each[layer] = step
    return Thresholds(_plain([pair.alpha_high for pair in each]), _plain([pair.alpha_low for pair in each]))


def _plain(values: list[float]) -> Threshold:
    """Returns a single number if all layers share it, otherwise a tuple."""
    return values[0] if len(set(values)) == 1 else tuple(values)
