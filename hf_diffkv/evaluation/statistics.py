"""Means over documents with confidence intervals, from a bootstrap that draws the same documents for all methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over documents.

    Attributes:
        total, weight: sum and weight; their quotient is the mean.
        low, high: confidence interval at `CONFIDENCE`, from the percentile bootstrap over documents; equal to the mean
            for a single document, which says nothing about others.
    """

    total: float
    weight: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


def estimate(sums: Sequence[tuple[float, float]]) -> Estimate:
    """Estimates the mean of documents given as (sum, weight). Raises `ValueError` if there are none."""
    values = np.asarray(sums, dtype=float).reshape(-1, 2)
    low, high = _interval(_means(_draws(len(values)), values))
    return Estimate(float(values[:, 0].sum()), float(values[:, 1].sum()), low, high)


def _draws(count: int) -> np.ndarray:
    """Draws how often each document occurs in each resample, [RESAMPLES, count]; the same for all methods."""
    if not count:
        raise ValueError("there are no documents to take a mean of.")
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)


def _means(draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    totals = draws @ values
    with np.errstate(invalid="ignore", divide="ignore"):
        return totals[:, 0] / totals[:, 1]


def _interval(means: np.ndarray) -> tuple[float, float]:
    known = means[np.isfinite(means)]
    if not known.size:
        return float("nan"), float("nan")
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(known, [tail, 100 - tail])
    return float(low), float(high)
