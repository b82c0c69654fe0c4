"""Prompts of stores whose tokens are chosen by thresholds, by kernels: nothing is read to level a layer."""

from __future__ import annotations

from torch import Tensor

from ..ops.store_by_thresholds import store_by_thresholds
from .exact_tokens import PINNED_SUM
from .forward import Forward
from .state import Store
from .transform import Entering


def relevel(store: Store, layer: int, new: Entering, received: Tensor, feedback: Tensor | None) -> None:
    """Adds what was received, float32 [batch, heads, P + Q], and levels a layer's new tokens and its past.

    Keys are rounded by `feedback` (transform.py). Whether new ones are finite is seen at the next look at the device.

    Raises:
        MemoryError: the most pages that the layer may lack are not there; it is as it was, and may fit nevertheless.
    """
    forward = Forward.of(store, layer, new)
    forward.provide(store, layer)
    tokens, placement = forward.tokens_of(new), forward.placement(store, layer, feedback)
    pin = (0, 0) if store.config.pin is None else store.config.pin
    store_by_thresholds(store.rows(layer), tokens, placement, received, pin, PINNED_SUM)
    store.forget_bounds()
    store.steps_since_compaction = 0
