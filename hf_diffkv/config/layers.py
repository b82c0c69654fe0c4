"""Configuration of each compressed layer of a model."""

from __future__ import annotations

import math

from ..precision import Precision
from .diffkv_config import DiffKVConfig


def layer_configs(config: DiffKVConfig, num_layers: int) -> tuple[DiffKVConfig, ...]:
    """Returns the configuration of each compressed layer (`of_layer`). Raises `ValueError` as `check_layers` does."""
    config.check_layers(num_layers)
    return tuple(config.of_layer(index) for index in range(num_layers))


def same_pages(one: DiffKVConfig, other: DiffKVConfig) -> bool:
    """Returns whether layers with these configurations (`DiffKVConfig.of_layer`) can share a store."""
    return (one.high, one.low, one.selects) == (other.high, other.low, other.selects)


def possible_precisions(config: DiffKVConfig, num_heads: int) -> tuple[tuple[Precision, ...], ...]:
    """Returns the precisions that tokens of each head of a layer can have; `config` as in `same_pages`."""
    if config.selects:
        return (tuple(dict.fromkeys((config.high, config.low))),) * num_heads
    alphas = config.alpha_high if isinstance(config.alpha_high, tuple) else (config.alpha_high,) * num_heads
    return tuple((config.low if alpha == math.inf else config.high,) for alpha in alphas)
