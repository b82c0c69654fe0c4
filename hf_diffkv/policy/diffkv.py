"""Thresholds relative to the theoretical average 1/N (DiffKV, section 4.2 and Algorithm 1)."""

from __future__ import annotations

from torch import Tensor


class DiffKVPolicy:
    """A token is high from `alpha_high / N` on, low from `alpha_low / N` on, pruned below."""

    def thresholds(self, alpha_high: Tensor, alpha_low: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Thresholds on the mean attention a token received.

        Args:
            alpha_high, alpha_low: float32, broadcast against `length`.
            length: int, real tokens each row has seen, at least 1.

        Returns:
            float32 thresholds of the high and of the low level.
        """
        tokens = length.float()
        return alpha_high / tokens, alpha_low / tokens


def mean_significance(score: Tensor, position: Tensor, length: Tensor) -> Tensor:
    """Mean attention from later queries, float32: sum / (N - 1 - position). All arguments broadcast."""
    return score / (length - 1 - position).clamp(min=1).float()
