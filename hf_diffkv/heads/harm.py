"""Loss by lowering a head from one precision to another, by which the heads to lower first are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..precision import Precision
from .sensitivity import Sensitivity

# loss of each KV head, by compressed layer
Harm = tuple[tuple[float, ...], ...]
# harm by lowering heads from one precision to another; None if it is not known
HarmBetween = Callable[[Precision, Precision], Harm | None]


def harm_of(measured: Sensitivity, precise: Precision, final: Precision) -> Harm | None:
    """Returns the predicted KL by which each head's loss grows; None if some bits were not measured.

    Groups were not measured; they change the loss of all heads alike, and so are left out.
    """
    precise, final = (replace(each, k_groups=1, v_groups=1) for each in (precise, final))
    if precise == final:
        return tuple((0.0,) * shape[0] for shape in measured.shapes)
    if not measured.knows(final):
        return None
    # bits that were not measured are more than those that were, and lose next to nothing
    known = measured.knows(precise)

    def growth(layer: int, head: int) -> float:
        before = measured.loss(layer, head, precise) if known else 0.0
        return max(0.0, measured.loss(layer, head, final) - before)

    return tuple(tuple(growth(layer, head) for head in range(s[0])) for layer, s in enumerate(measured.shapes))
