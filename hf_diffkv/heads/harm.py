"""Loss from lowering a head from one precision to another, which decides the heads to lower first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..precision import Precision
from .sensitivity import Sensitivity

# loss of each KV head, by compressed layer
Harm = tuple[tuple[float, ...], ...]
# harm from lowering heads from one precision to another; None if unknown
HarmBetween = Callable[[Precision, Precision], Harm | None]


def harm_of(measured: Sensitivity, precise: Precision, final: Precision) -> Harm | None:
    """Returns the predicted increase in KL for each head; None if some bits were not measured.

    Groups were not measured; they affect the loss of all heads alike and are therefore ignored.
    """
    precise, final = (replace(each, k_groups=1, v_groups=1) for each in (precise, final))
    if precise == final:
        return tuple((0.0,) * shape[0] for shape in measured.shapes)
    if not measured.knows(final):
        return None
    # unmeasured bits are above the measured ones and lose next to nothing
    known = measured.knows(precise)

    def growth(layer: int, head: int) -> float:
        before = measured.loss(layer, head, precise) if known else 0.0
        return max(0.0, measured.loss(layer, head, final) - before)

    return tuple(tuple(growth(layer, head) for head in range(s[0])) for layer, s in enumerate(measured.shapes))
