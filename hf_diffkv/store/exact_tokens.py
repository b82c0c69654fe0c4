"""The exact tokens of a store: sinks and windows (their slots: pages/window.py), and how pinned ones leave them.

Pinned tokens stay at the high level (`DiffKVConfig.pin`). A step that looks for a victim knows sums alone, so a pinned
token has one that nothing exceeds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.rotation import center_windows
from ..pages import window
from .state import Store

ALL = slice(None)
# above every threshold, and far from overflow however much is added; narrow pages hold their largest number for it
PINNED_SUM = 1e30


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


def is_pinned(store: Store, position: Tensor) -> Tensor | None:
    """bool of the shape of positions among a request's real tokens; None where nothing is pinned."""
    if store.config.pin is None:
        return None
    start, stop = store.config.pin
    return (position >= start) & (position < stop)


def pinned_sums(store: Store, score: Tensor, position: Tensor) -> Tensor:
    """Sums, float32, of tokens that leave the window: the given ones, or for pinned tokens the largest."""
    pinned = is_pinned(store, position)
    return score if pinned is None else torch.where(pinned, PINNED_SUM, score)


def pin_candidates(store: Store) -> None:
    """The same for the oldest token of every window, in place; nothing where nothing is pinned."""
    if store.config.pin is None:
        return
    position = store.window_start[:, :, None, None]
    slot = candidate_slots(store)
    score = store.window_score.gather(3, slot)
    store.window_score.scatter_(3, slot, pinned_sums(store, score, position))
