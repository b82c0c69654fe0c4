"""What attention makes of its logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Softmax:
    """The same for all queries of a layer.

    Attributes:
        scaling: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them as they are.
        sinks: [query_heads], logits of attention sinks (one extra softmax column each); None without any.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
