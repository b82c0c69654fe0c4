"""What a layer holds beside its pages, as tokens enter it and all others are levelled anew."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..store_uniform import EnteredRows


@dataclass(frozen=True)
class LevelledRows(EnteredRows):
    """Tensors of one layer whose pages hold scores and positions, all changed in place but for the thresholds.

    Attributes:
        low_count: int32 [batch, heads].
        alpha_high, alpha_low: float32 [batch, heads], relative thresholds (DiffKV, section 4.2).
    """

    low_count: Tensor
    alpha_high: Tensor
    alpha_low: Tensor

    def check_received(self, received: Tensor, tokens: int) -> None:
        """Raises `ValueError` unless `received` and what this adds to `EnteredRows` fit and are contiguous."""
        shape = self.high_count.shape
        for name in ("low_count", "alpha_high", "alpha_low"):
            tensor = getattr(self, name)
            if tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(f"{name} must be {list(shape)} and contiguous, not {list(tensor.shape)}.")
        if received.shape[:2] != shape or received.shape[2] < tokens:
            raise ValueError(
                f"received must be {list(shape)} and at least {tokens} columns, not {list(received.shape)}."
            )
