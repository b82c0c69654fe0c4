"""Describes in words how a cache stores its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..precision import PRECISION_NAME, Precision

# a layer's report and the index of one of its heads
Head = tuple[Any, int]


def chosen_heads(layers: Sequence[Any]) -> list[Head]:
    """Returns the heads whose tokens differ in level: those with two precisions, or else all if any token is pruned.

    Args:
        layers: one `LayerReport` per compressed layer.
    """
    heads = list(_heads(layers))
    two = [(layer, head) for layer, head in heads if len(_precisions(layer, head)) > 1]
    return two or (heads if any(sum(layer.pruned) for layer in layers) else [])


def kept_in_words(layers: Sequence[Any]) -> str:
    """Describes the number of tokens, the number of uncompressed ones, and the storage of the others.

    Counts are per token, while a report's are per token, layer and head. For heads that choose levels, shares are of
    these heads' tokens outside the window.

    Args:
        layers: one `LayerReport` per compressed layer, at least one.
    """
    tokens = sum(getattr(layers[0], name)[0] for name in ("high", "low", "window", "pruned"))
    window = max(max(layer.window) for layer in layers)
    said = f"{tokens:,} token{'' if tokens == 1 else 's'}"
    if window >= tokens:
        return f"{said}, all uncompressed"
    chosen = chosen_heads(layers)
    parts = [_shares(chosen)] if chosen else []
    fixed = {name for head in _heads(layers) if head not in chosen for name in _precisions(*head)}
    if fixed and chosen:
        parts.append(f"in other heads {_range(fixed)}")
    elif fixed:
        parts.append(f"the others {_range(fixed)}")
    return "; ".join([f"{said}, {window:,} of them uncompressed", *filter(None, [", ".join(parts)])])


def _heads(layers: Sequence[Any]) -> Iterator[Head]:
    return ((layer, head) for layer in layers for head in range(len(layer.high)))


def _precisions(layer: Any, head: int) -> tuple[str, ...]:
    """Returns the names of a head's precisions: two if it chooses levels, as in K8V4/K4V2g2/4; none if unknown."""
    named = layer.precisions[head] if layer.precisions else ""
    return tuple(match[0] for match in PRECISION_NAME.finditer(named))


def _range(precisions: set[str]) -> str:
    """Names the precision, or the lowest and the highest one."""

    def order(name: str) -> tuple[int, int, str]:
        precision = Precision.parse(name)
        groups = precision.k_groups + precision.v_groups
        return precision.k_bits + precision.v_bits, groups, name

    ordered = sorted(precisions, key=order)
    return f"in {ordered[0]}" if len(ordered) == 1 else f"in {ordered[0]} to {ordered[-1]}, by head"


def _shares(heads: Sequence[Head]) -> str:
    counts = {name: sum(getattr(layer, name)[head] for layer, head in heads) for name in ("high", "low", "pruned")}
    names = {_precisions(layer, head) for layer, head in heads}
    high, low = (*next(iter(names)), "", "")[:2] if len(names) == 1 else ("", "")
    labels = {"high": f"high ({high})" if low else f"kept ({high})" if high else "high", "low": "low"}
    if low:
        labels["low"] = f"low ({low})"
    total = sum(counts.values())
    shares = (f"{labels.get(name, name)} {count / total:.0%}" for name, count in counts.items() if count)
    return f"of the others {', '.join(shares)}"
