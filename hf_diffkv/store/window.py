"""The exact tokens of a store: sinks and windows (their slots: pages/window.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.rotation import center_windows
from ..pages import window

if TYPE_CHECKING:
    from .state import Store

ALL = slice(None)


def is_whole(store: Store, layer: int | slice = ALL) -> Tensor:
    """bool [layers, batch], or without layers: where no token has left the window."""
    return store.window_start[layer] == store.sink_end[layer]


def held_tokens(store: Store, layer: int | slice = ALL) -> Tensor:
    """int64 [layers, batch, window_slots], or without layers: the token in each slot, -1 for none."""
    state = (store.window_start[layer], store.length[layer], store.sink_end[layer])
    return window.held_tokens(*state, store.sink_slots, store.window_slots)


def held_count(store: Store, layer: int | slice = ALL) -> Tensor:
    """int64 [layers, batch], or without layers: how many there are."""
    return window.held_count(store.window_start[layer], store.length[layer], store.sink_end[layer])


def slots_of(store: Store, position: Tensor, sink_end: Tensor) -> Tensor:
    """Their slots; position, and what their requests have as `sink_end`: int64 that broadcast."""
    return window.slots_of(position, sink_end, store.sink_slots, store.window_slots)


def candidate_slots(store: Store) -> Tensor:
    """Slot of the oldest token of every window, which is the next to leave: int64 [layers, batch, heads, 1]."""
    slot = slots_of(store, store.window_start, store.sink_end)[:, :, None, None]
    return slot.expand(-1, -1, store.num_heads, 1)


def exact_tokens(store: Store, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, row and index, int64 [n] each, of those of one layer."""
    token = held_tokens(store, layer).repeat_interleave(store.num_heads, dim=0)
    row, slot = (token >= 0).nonzero(as_tuple=True)
    return slot, row, token[row, slot]


def center_rows(store: Store) -> None:
    """Fixes the key offset of rows whose first token is about to leave the window (see transform.py)."""
    due = is_whole(store) & (store.length - store.window_start > store.config.window)
    for layer in store.uncentered:
        due[layer] = False
    center_windows(store.window_key, held_tokens(store) >= 0, store.key_offset, due)
