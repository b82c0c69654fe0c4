"""Softmax parameters of a layer, and the attention that tokens receive from several layers for one new token."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Softmax:
    """Softmax parameters, common to all queries of a layer.

    Attributes:
        scaling: factor of the logits.
        softcap: cap of the logits, which become softcap * tanh(logits / softcap); None for no cap.
        sinks: logits of attention sinks (one extra softmax column each), [query_heads]; None without any.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def factors(self) -> tuple[float, float | None]:
        """Returns (scale, cap), with which the kernels turn q . k into a logit in units of log2.

        Without a softcap, the logit is scale * (q . k). With one, it is softcap * tanh(scaling * (q . k) / softcap).
        Kernels compute tanh(x / 2) as 1 - 2 / (exp(x) + 1), so scale yields x * log2(e), and cap is softcap * log2(e).
        """
        if self.softcap is None:
            return self.scaling * log2(e), None
        return 2 * self.scaling * log2(e) / self.softcap, self.softcap * log2(e)


@dataclass
class SharedAttention:
    """Accumulator of the attention from several layers to the same tokens; their query heads count as one group.

    Attributes:
        last: whether the next layer is the last one, which alone updates the sums.
        received: maximum so far; None before the first layer. A list with one tensor per part of the work in the
            reference, a float32 [rows, positions] tensor in the layout of the logits in the kernels.
    """

    last: bool = False
    received: list[Tensor] | Tensor | None = None
