"""What tokens receive from several attentions of one new token, until the last of them adds it to their sums."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
