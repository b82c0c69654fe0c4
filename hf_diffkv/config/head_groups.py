"""KV heads of a layer that are held alike: those that have a precision each, or those whose tokens thresholds level.

A layer is one group, but for one of which `head_precisions` names the precision of some heads and leaves others to
thresholds: it is two, and what holds tokens takes each of them for a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..precision import Precision
from .checks import splits
from .diffkv_config import DiffKVConfig


@dataclass(frozen=True)
class HeadGroup:
    """Some KV heads of a layer, or all.

    Attributes:
        layer: index among the compressed layers of the model.
        heads: which of this rank's heads; None is all of them.
        config: what holds for them, as `DiffKVConfig.of_layer` has it.
        model_heads: which of the model's heads they are, where they are some.
    """

    layer: int
    heads: tuple[int, ...] | None
    config: DiffKVConfig
    model_heads: tuple[int, ...] = ()

    def count(self, num_heads: int) -> int:
        """How many they are, of a layer that has `num_heads` here."""
        return num_heads if self.heads is None else len(self.heads)

    def goes_with(self, other: HeadGroup) -> bool:
        """Whether both may be in one store."""
        return len(self.heads or ()) == len(other.heads or ()) and same_pages(self.config, other.config)

    def first_head(self, count: int, rank: int) -> int:
        """Number of the first of `count` heads that rank `rank` has, among those of which there are moments."""
        return rank * count if self.heads is None else 0

    def measured(self, count: int, size: int) -> int:
        """Of how many heads there are moments where each of `size` ranks has `count`."""
        return size * count if self.heads is None else count

    def precisions(self, num_heads: int) -> tuple[tuple[Precision, ...], ...]:
        """For each of them the precisions that its stored tokens may have, of a layer that has `num_heads` here."""
        config, count = self.config, self.count(num_heads)
        if config.selects:
            return (tuple(dict.fromkeys((config.high, config.low))),) * count
        alphas = config.alpha_high if isinstance(config.alpha_high, tuple) else (config.alpha_high,) * count
        return tuple((config.low if alpha == math.inf else config.high,) for alpha in alphas)


def same_pages(one: DiffKVConfig, other: DiffKVConfig) -> bool:
    """Whether layers of both, as `DiffKVConfig.of_layer` has them, may be in one store."""
    return (one.high, one.low, one.selects) == (other.high, other.low, other.selects)


def head_groups(config: DiffKVConfig, num_layers: int, rank: int = 0, size: int = 1) -> tuple[HeadGroup, ...]:
    """All groups of a model, layer by layer; those that thresholds level come first in theirs.

    Args:
        num_layers: compressed layers of the model.
        rank, size: this process among those that share out the heads of layers.

    Raises:
        ValueError: precisions or thresholds for another number of layers, or heads that cannot be shared out.
    """
    config.check_layers(num_layers)
    groups: list[HeadGroup] = []
    for index, layer in enumerate(config.head_precisions or (None,) * num_layers):
        if layer is None or not splits(layer):
            groups.append(HeadGroup(index, None, config.of_layer(index)))
            continue
        if len(layer) % size:
            raise ValueError(f"head_precisions[{index}] has {len(layer)} entries, which {size} ranks cannot share.")
        first, count = rank * len(layer) // size, len(layer) // size
        here = range(first, first + count)
        for by_thresholds in (True, False):
            mine = tuple(head for head in here if (layer[head] is None) == by_thresholds)
            if mine:
                heads = tuple(head - first for head in mine)
                groups.append(HeadGroup(index, heads, _config_of(config, index, mine, by_thresholds), mine))
    return tuple(groups)


def gathered(groups: Sequence[HeadGroup], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """One list for the heads of a layer from one for each of its groups."""
    if groups[0].heads is None:
        return list(parts[0])
    found = {head: value for group, part in zip(groups, parts) for head, value in zip(group.heads or (), part)}
    return [found[head] for head in sorted(found)]


def _config_of(config: DiffKVConfig, index: int, heads: tuple[int, ...], by_thresholds: bool) -> DiffKVConfig:
    """What holds for some of a layer's heads, which are of one kind."""
    precisions = list(config.head_precisions or ())
    layer = precisions[index] or ()
    named = tuple(precision for precision in layer if precision is not None)
    precisions[index] = None if by_thresholds else named
    found = replace(config, head_precisions=tuple(precisions)).of_layer(index)
    # `found` knows only of heads with a precision
    places = [head if by_thresholds else sum(one is not None for one in layer[:head]) for head in heads]
    alphas = {name: getattr(found, name) for name in ("alpha_high", "alpha_low")}
    return replace(found, **{name: _of_heads(name, value, index, places) for name, value in alphas.items()})


def _of_heads(name: str, value: Any, index: int, places: Sequence[int]) -> Any:
    if not isinstance(value, tuple):
        return value
    if max(places) >= len(value):
        raise ValueError(f"{name} has {len(value)} entries for layer {index} but head_precisions has more; give both.")
    return tuple(value[place] for place in places)
