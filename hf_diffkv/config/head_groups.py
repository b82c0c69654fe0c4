"""Head groups: the KV heads of a layer with a fixed precision each, or those with thresholds.

A layer is usually one group. If `head_precisions` fixes the precision of only some heads, it is two groups, and stores
treat each of them as a layer.
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
    """Some or all KV heads of a layer.

    Attributes:
        layer: index among the compressed layers of the model.
        heads: indices among this rank's heads; None is all of them.
        config: configuration of the group, from `DiffKVConfig.of_layer`.
        model_heads: indices among the model's heads; empty if `heads` is None.
    """

    layer: int
    heads: tuple[int, ...] | None
    config: DiffKVConfig
    model_heads: tuple[int, ...] = ()

    def count(self, num_heads: int) -> int:
        """Returns the number of heads, for a layer with `num_heads` heads on this rank."""
        return num_heads if self.heads is None else len(self.heads)

    def goes_with(self, other: HeadGroup) -> bool:
        """Returns whether both groups may be in one store."""
        return len(self.heads or ()) == len(other.heads or ()) and same_pages(self.config, other.config)

    def first_head(self, count: int, rank: int) -> int:
        """Returns the index, among the heads with measured moments, of the first of `count` heads of rank `rank`."""
        return rank * count if self.heads is None else 0

    def measured(self, count: int, size: int) -> int:
        """Returns the number of heads with measured moments if each of `size` ranks has `count` heads."""
        return size * count if self.heads is None else count

    def precisions(self, num_heads: int) -> tuple[tuple[Precision, ...], ...]:
        """Returns the possible precisions of each head's tokens, for a layer with `num_heads` heads on this rank."""
        config, count = self.config, self.count(num_heads)
        if config.selects:
            return (tuple(dict.fromkeys((config.high, config.low))),) * count
        alphas = config.alpha_high if isinstance(config.alpha_high, tuple) else (config.alpha_high,) * count
        return tuple((config.low if alpha == math.inf else config.high,) for alpha in alphas)


def same_pages(one: DiffKVConfig, other: DiffKVConfig) -> bool:
    """Returns whether layers with these configurations (`DiffKVConfig.of_layer`) may be in one store."""
    return (one.high, one.low, one.selects) == (other.high, other.low, other.selects)


def head_groups(config: DiffKVConfig, num_layers: int, rank: int = 0, size: int = 1) -> tuple[HeadGroup, ...]:
    """Returns all head groups of a model, layer by layer, within a layer the one with thresholds first.

    Args:
        config: configuration of the cache.
        num_layers: number of compressed layers of the model.
        rank, size: this process's rank, and the number of ranks that split the heads.

    Raises:
        ValueError: precisions or thresholds are given for another number of layers, or heads cannot be split.
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
    """Joins the lists of a layer's groups to one list over its heads."""
    if groups[0].heads is None:
        return list(parts[0])
    found = {head: value for group, part in zip(groups, parts) for head, value in zip(group.heads or (), part)}
    return [found[head] for head in sorted(found)]


def _config_of(config: DiffKVConfig, index: int, heads: tuple[int, ...], by_thresholds: bool) -> DiffKVConfig:
    """Returns the configuration of a group of a layer's heads."""
    precisions = list(config.head_precisions or ())
    layer = precisions[index] or ()
    named = tuple(precision for precision in layer if precision is not None)
    precisions[index] = None if by_thresholds else named
    found = replace(config, head_precisions=tuple(precisions)).of_layer(index)
    # `found` has only the heads with a precision
    places = [head if by_thresholds else sum(one is not None for one in layer[:head]) for head in heads]
    alphas = {name: getattr(found, name) for name in ("alpha_high", "alpha_low")}
    return replace(found, **{name: _of_heads(name, value, index, places) for name, value in alphas.items()})


def _of_heads(name: str, value: Any, index: int, places: Sequence[int]) -> Any:
    if not isinstance(value, tuple):
        return value
    if max(places) >= len(value):
        raise ValueError(f"{name} has {len(value)} entries for layer {index} but head_precisions has more; give both.")
    return tuple(value[place] for place in places)
