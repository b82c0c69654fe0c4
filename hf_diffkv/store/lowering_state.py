"""State that a store keeps for `lowering.py` besides its rows."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
from torch import Tensor

from ..config import DiffKVConfig
from ..config.until_full import MIDDLES, precisions_in_turn
from ..pages.layout import fits
from ..precision import Precision


def precisions_of(config: DiffKVConfig, key_dim: int, value_dim: int) -> tuple[Precision, ...]:
    """Returns the successive precisions of a store's rows, at least two: each stage has two neighbours.

    Args:
        config: configuration of the layers (`DiffKVConfig.of_layer`).
    """
    if config.precise is None:
        return config.high, config.low
    found = precisions_in_turn(config)
    alphas = config.alpha_high if isinstance(config.alpha_high, tuple) else (config.alpha_high,)
    # heads that end at the second-to-last one need it
    passed = found[1 : -1 if all(alpha == math.inf for alpha in alphas) else -2]
    unfit = {each for each in passed if each in MIDDLES and not fits(each, key_dim, value_dim)}
    return tuple(each for each in found if each not in unfit)


@dataclass
class LoweringState:
    """Heads to lower, and what has been done and logged so far.

    Attributes:
        active: whether whole rows are lowered to stay within the budget.
        harm: loss from lowering each head from one precision to the next, float64 [precisions - 1, model_layers, heads]
            for this store's heads; None if not known.
        keeps: heads that end at the second-to-last precision, bool [layers, heads]; None if all go to the last.
        moments: sum of q q^T over the queries of all prompts, [layers, heads, key_dim, key_dim], for which lowered keys
            are rounded; None if the model's moments are known or nothing is rounded.
        tokens: number of times that stored tokens were lowered.
        told_full, told_final: whether it was logged that lowering has begun, and that all rows are lowered.
        made_room: whether room was made for the current forward of several tokens.
        after: length of each request after that forward, int64 [layers, batch]; None without `made_room`.
        promised: bytes that layers still to come in this forward will record; they count as held.
        together: stores of one cache that share the device's budget, this one included, as last set by the cache;
            copies do not keep them.
    """

    active: bool = False
    harm: np.ndarray | None = None
    keeps: np.ndarray | None = None
    moments: Tensor | None = None
    tokens: int = 0
    told_full: bool = False
    told_final: bool = False
    made_room: bool = False
    after: np.ndarray | None = None
    promised: int = 0
    together: tuple[weakref.ref, ...] = ()

    def begin(self) -> None:
        """Prepares for the next forward."""
        self.made_room, self.after, self.promised = False, None, 0

    def note_final(self, layer: int, alpha_high: Union[float, tuple[float, ...]], shape: tuple[int, int]) -> None:
        """Notes which heads of a layer go to the last precision: those with an infinite threshold.

        Args:
            shape: number of layers and heads.
        """
        alphas = alpha_high if isinstance(alpha_high, tuple) else (alpha_high,) * shape[1]
        if self.keeps is None:
            self.keeps = np.zeros(shape, dtype=bool)
        self.keeps[layer] = [alpha < math.inf for alpha in alphas]

    def drop_layers(self, used: int) -> None:
        """Forgets all layers but the first `used`."""
        self.moments = None if self.moments is None else self.moments[:used].clone()
        self.keeps = None if self.keeps is None else self.keeps[:used].copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "together": ()}
