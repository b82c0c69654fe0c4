"""Prompts of stores whose tokens are chosen by thresholds, by kernels: nothing is read to level a layer."""

from __future__ import annotations

from torch import Tensor

from ..ops.store_by_thresholds import LevelledRows, relevel_tokens
from .enter import entered_rows
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
    chosen = {name: getattr(store, name)[layer] for name in ("low_count", "alpha_high", "alpha_low")}
    relevel_tokens(
        LevelledRows(**entered_rows(store, layer), **chosen),
        store.pool.pages,
        store.layout,
        store.pool.free_list,
        new.key,
        new.value,
        received=received,
        feedback=feedback,
        pin=(0, 0) if store.config.pin is None else store.config.pin,
        pinned_sum=PINNED_SUM,
        **forward.options(store, layer),
    )
    store.forget_bounds()
    store.steps_since_compaction = 0
