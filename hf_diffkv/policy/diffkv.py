"""Thresholds relative to the theoretical average 1/N (DiffKV, SOSP 2025, section 4.2 and Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .base import Policy


@dataclass(frozen=True)
class DiffKV(Policy):
    """DiffKV's policy: high at a mean of `alpha_high / N` or more, low at `alpha_low / N` or more, pruned below."""

    by_thresholds: ClassVar[bool] = True

    def first_alphas(self, alpha_high: Any, alpha_low: Any) -> tuple[Any, Any]:
        return alpha_high, alpha_low
