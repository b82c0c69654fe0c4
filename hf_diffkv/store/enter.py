"""Prompts of stores that keep every token high, by kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.store_uniform import EnteredRows, enter_tokens
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
    enter_tokens(
        EnteredRows(**entered_rows(store, layer)),
        store.pool.pages,
        store.layout,
        store.pool.free_list,
        new.key,
        new.value,
        holds=forward.longest[layer] > 0,
        feedback=feedback,
        **forward.options(store, layer),
    )
    store.forget_bounds()
    store.steps_since_compaction = 0


def entered_rows(store: Store, layer: int) -> dict[str, Any]:
    """Fields of `EnteredRows`."""
    shared = ("high_count", "window_key", "window_value", "window_score", "length", "window_start", "sink_end")
    rows = {name: getattr(store, name)[layer] for name in (*shared, "key_offset")}
    return rows | {"page_table": store.table.table[layer], "invalid": store.invalid, "sink_slots": store.sink_slots}
