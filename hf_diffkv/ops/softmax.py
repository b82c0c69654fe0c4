"""What attention makes of its logits, and what tokens receive from several attentions of one new token."""

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


@dataclass
class Held:
    """Attentions of the same tokens by several layers of the model, whose query heads count as one group.

    Attributes:
        last: whether the next attention is the last one; it alone changes the sums.
        received: the maximum so far, None before the first attention: in the reference a tensor for each piece of the
            work, in the kernels float32 [rows, positions], laid out like their logits.
    """

    last: bool = False
    received: list[Tensor] | Tensor | None = None
