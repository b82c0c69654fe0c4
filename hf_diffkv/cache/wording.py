"""Describes in words how a cache stores its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

# separates the two precisions of a head that chooses levels, as in K8V4/K4V2
EITHER = "/"

# a layer's report and the index of one of its heads
Head = tuple[Any, int]


def chosen_heads(layers: Sequence[Any]) -> list[Head]:
    """Returns the heads whose tokens differ in level: those with two precisions, or else all if any token is pruned.

    Args:
        layers: one `LayerReport` per compressed layer.
    """
    heads = list(_heads(layers))
    two = [(layer, head) for layer, head in heads if EITHER in _precision(layer, head)]
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
    fixed = {_precision(*head) for head in _heads(layers) if head not in chosen} - {""}
    if fixed and chosen:
        parts.append(f"in other heads {_range(fixed)}")
    elif fixed:
        parts.append(f"the others {_range(fixed)}")
    return "; ".join([f"{said}, {window:,} of them uncompressed", *filter(None, [", ".join(parts)])])


def _heads(layers: Sequence[Any]) -> Iterator[Head]:
    return ((layer, head) for layer in layers for head in range(len(layer.high)))


def _precision(layer: Any, head: int) -> str:
    return layer.precisions[head] if layer.precisions else ""


def _range(precisions: set[str]) -> str:
    """Names the precision, or the lowest and the highest one."""
    ordered = sorted(precisions, key=lambda name: (sum(map(int, re.findall(r"\d+", name))), name))
    return f"in {ordered[0]}" if len(ordered) == 1 else f"in {ordered[0]} to {ordered[-1]}, by head"


def _shares(heads: Sequence[Head]) -> str:
    counts = {name: sum(getattr(layer, name)[head] for layer, head in heads) for name in ("high", "low", "pruned")}
    names = {_precision(layer, head) for layer, head in heads}
    high, _, low = next(iter(names)).partition(EITHER) if len(names) == 1 else ("", "", "")
    labels = {"high": f"high ({high})" if low else f"kept ({high})" if high else "high", "low": "low"}
    if low:
        labels["low"] = f"low ({low})"
    total = sum(counts.values())
    shares = (f"{labels.get(name, name)} {count / total:.0%}" for name, count in counts.items() if count)
    return f"of the others {', '.join(shares)}"
