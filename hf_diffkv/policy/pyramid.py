"""SnapKV with budgets that fall from layer to layer (PyramidKV, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import ForwardRows, option
from .snapkv import SnapKV


@dataclass(frozen=True)
class Pyramid(SnapKV):
    """As `snapkv`; the share of a layer falls linearly from the first to the last, which gets `budget / beta`.

    The mean over the layers is `budget`. Where the first layer would get more than everything, it gets everything and
    the last one as much more.

    Args:
        budget: mean share of the tokens outside the window.
        pool: as in `snapkv`.
        beta: the greater, the steeper; 1 is `snapkv`.
    """

    beta: float = option(20.0, least=1)

    def layer_budget(self, rows: ForwardRows) -> float:
        first = min(1.0, 2 * self.budget - self.budget / self.beta)
        last = 2 * self.budget - first
        return first + (last - first) * rows.layer / max(1, rows.num_layers - 1) if rows.num_layers > 1 else self.budget
