"""Loss by lowering a head from one precision to another, by which the heads to lower first are chosen."""

from __future__ import annotations

from dataclasses import replace

from ..precision import Precision
from .sensitivity import Sensitivity

# loss of each KV head, by compressed layer
Harm = tuple[tuple[float, ...], ...]


def harm_of(measured: Sensitivity, precise: Precision, final: Precision) -> Harm | None:
    """Returns the predicted KL by which each head's loss grows; None if the bits were not measured.

    Groups were not measured; they change the loss of all heads alike, and so are left out.
    """
    errors = ({16: 0.0, **measured.key_errors}, {16: 0.0, **measured.value_errors})
    if final.k_bits not in errors[0] or final.v_bits not in errors[1]:
        return None
    # bits that were not measured are more than those that were, and lose next to nothing
    known = precise.k_bits in errors[0] and precise.v_bits in errors[1]
    high, low = (replace(precision, k_groups=1, v_groups=1) for precision in (precise, final))

    def growth(layer: int, head: int) -> float:
        before = measured.loss(layer, head, high) if known else 0.0
        return max(0.0, measured.loss(layer, head, low) - before)

    return tuple(tuple(growth(layer, head) for head in range(shape[0])) for layer, shape in enumerate(measured.shapes))
