"""Tokens that stay at the high level: `DiffKVConfig.pin`.

A step that looks for a victim knows sums alone, so a pinned token has one that nothing exceeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .window import candidate_slots

if TYPE_CHECKING:
    from .state import Store

# above every threshold, and far from overflow however much is added; narrow pages hold their largest number for it
PINNED_SUM = 1e30


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
