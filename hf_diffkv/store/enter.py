"""Prompts of stores that keep every token high, by kernels."""

from __future__ import annotations

from torch import Tensor

from ..ops.store_uniform import store_uniform
from .forward import Forward
from .state import Store
from .transform import Entering


def enter(store: Store, layer: int, new: Entering, feedback: Tensor | None) -> None:
    """Stores a layer's new tokens; keys are rounded by `feedback` (transform.py).

    Whether they are finite is seen at the next look at the device, as with steps of one token.

    Raises:
        MemoryError: the forward's tokens do not fit; the layer is as it was.
    """
    forward = Forward.of(store, layer, new)
    forward.provide(store, layer)
    tokens, placement = forward.tokens_of(new), forward.placement(store, layer, feedback)
    store_uniform(store.rows(layer), tokens, placement, holds=forward.longest[layer] > 0)
    store.forget_bounds()
    store.steps_since_compaction = 0
