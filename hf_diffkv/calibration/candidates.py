"""Thresholds and what they were measured to cost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..config import Threshold


@dataclass(frozen=True)
class Thresholds:
    """A pair of thresholds, each one number or one per compressed layer."""

    alpha_high: Threshold
    alpha_low: Threshold

    def method(self, base: str) -> str:
        """The method that has these thresholds and else the options of `base`."""
        values = {"alpha_high": self.alpha_high, "alpha_low": self.alpha_low}
        options = "+".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        return f"{base}{'+' if ':' in base else ':'}{options}"


@dataclass(frozen=True)
class Candidate:
    """Thresholds that were measured.

    Attributes:
        bytes: what the cache really held, summed over the documents; None where it failed.
        ratio: to what a dense cache of as many tokens held.
        loss: how much worse than the dense cache, in the figure that calibration goes by.
        error: why it failed.
    """

    thresholds: Thresholds
    bytes: int | None = None
    ratio: float | None = None
    loss: float | None = None
    error: str | None = None

    def to_dict(self, loss_name: str) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {"alpha_high": self.thresholds.alpha_high, "alpha_low": self.thresholds.alpha_low}
        if self.error is not None:
            return {**values, "error": self.error}
        return {**values, "bytes": self.bytes, "ratio": self.ratio, loss_name: self.loss}


def cheapest(candidates: Iterable[Candidate], limit: float) -> Candidate | None:
    """The one of the lowest ratio that loses at most `limit`; of several the one that loses least; None without any."""
    good = [each for each in candidates if each.error is None and each.loss <= limit]
    return min(good, key=lambda each: (each.ratio, each.loss), default=None)


def closest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one that loses least; None where all failed."""
    return min((each for each in candidates if each.error is None), key=lambda each: each.loss, default=None)


def table(candidates: Iterable[Candidate], limit: float, loss_title: str) -> str:
    """All candidates in Markdown, the most bytes first."""
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
