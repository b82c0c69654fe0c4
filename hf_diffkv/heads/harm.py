"""Loss by lowering a head from one precision to another, by which the heads to lower first are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..precision import Precision
from .sensitivity import Sensitivity

# loss of each KV head, by compressed layer
Harm = tuple[tuple[float, ...], ...]


def harm_of(measured: Sensitivity, rungs: Sequence[tuple[Precision, Precision]]) -> Harm | None:
    """Returns the predicted KL by which each head's loss grows; None if some bits were not measured.

    Groups were not measured; they change the loss of all heads alike, and so are left out.

    Args:
        rungs: precision before and after lowering, by compressed layer.
    """
    layers = [
        _growth(measured, layer, *(replace(p, k_groups=1, v_groups=1) for p in pair))
        for layer, pair in enumerate(rungs)
    ]
    return None if None in layers else tuple(growth for growth in layers if growth is not None)


def _growth(measured: Sensitivity, layer: int, precise: Precision, final: Precision) -> tuple[float, ...] | None:
    errors = ({16: 0.0, **measured.key_errors}, {16: 0.0, **measured.value_errors})
    heads = range(measured.shapes[layer][0])
    if precise == final:
        return (0.0,) * len(heads)
    if final.k_bits not in errors[0] or final.v_bits not in errors[1]:
        return None
    # bits that were not measured are more than those that were, and lose next to nothing
    known = precise.k_bits in errors[0] and precise.v_bits in errors[1]
    before = [measured.loss(layer, head, precise) if known else 0.0 for head in heads]
    return tuple(max(0.0, measured.loss(layer, head, final) - before[head]) for head in heads)
