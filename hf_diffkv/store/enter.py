"""Prompts of stores that keep every token high, by kernels: what the host must know of a forward is read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..memory import PagePool
from ..memory.free_list import FREE
from ..ops.backend import KERNELS
from ..ops.enter import EnteredRows, enter_tokens
from .look import pages_of, read_together

if TYPE_CHECKING:
    from .state import Store
    from .transform import Entering


def enters_at_once(store: Store) -> bool:
    """Whether a prompt's tokens go straight to where they stay: none is chosen, and kernels run."""
    return not store.layout.selects and store.backend() == KERNELS and type(store.pool) is PagePool


@dataclass
class Forward:
    """What the host knows of the layers of a store before a forward of several tokens.

    Attributes:
        tokens: new ones of each request, padding included.
        rank, count: of the new tokens, as the op takes them.
        longest: tokens of each layer's longest row, window included. centers: layers with a row to be centred.
        pages: that all layers lack together. free: pages that are free.
        width: tokens of the longest row afterwards, as its table must hold them.
        left: layers whose tokens are still to come.
    """

    tokens: int
    rank: Tensor | None
    count: Tensor | None
    longest: list[int]
    centers: list[bool]
    pages: int
    free: int
    width: int
    left: set[int]
    provided: bool = False

    @classmethod
    def of(cls, store: Store, layer: int, new: Entering) -> Forward:
        """What is known, or read from the device if the forward has not been looked at yet.

        Raises:
            ValueError: an earlier forward stored keys or values that are not finite.
        """
        known, tokens = store.forward, new.key.shape[2]
        same = known is not None and known.tokens == tokens and (known.rank is None) == (new.valid is None)
        if not same or layer not in known.left:
            store.forward = cls.read(store, tokens, new.valid)
        return store.forward

    @classmethod
    def read(cls, store: Store, tokens: int, valid: Tensor | None) -> Forward:
        rank = count = None
        if valid is not None:
            rank = torch.where(valid, valid.cumsum(-1, dtype=torch.int32) - 1, -1).to(torch.int32)
            count = valid.sum(-1)
        parts = [store.high_count, store.length, store.window_start, store.sink_end]
        real = torch.full_like(store.length[0], tokens) if count is None else count
        free, real, high, length, start, end, *flags = read_together(
            store.pool.free_list.state[FREE], real, *parts, *store.flags()
        )
        store.raise_for(*map(bool, flags))
        after = length + real
        new_start = np.maximum(start, after - store.config.window)
        stored, capacity = new_start - end, store.layout.high.capacity
        lacking = pages_of(stored, capacity) - pages_of(high.max(-1), capacity)
        due = (start == end) & (after - start > store.config.window)
        centers = store.config.center & due.any(1)
        held = high.max(-1) + np.maximum(length - start, 0) + np.minimum(length, end)
        return cls(
            tokens,
            rank,
            count,
            held.max(1).tolist(),
            [bool(centers[layer]) and layer not in store.uncentered for layer in range(store.num_layers)],
            int(np.maximum(lacking, 0).sum()) * store.num_heads,
            int(free),
            int(stored.max()) + store.window_slots,
            set(range(store.num_layers)),
        )

    def provide(self, store: Store) -> None:
        """Makes room for what the whole forward stores; raises `MemoryError`, and nothing has changed then."""
        if self.provided:
            return
        store.ensure_width(self.width)
        store.update_limit()
        store.pool.ensure_free(self.pages, self.free)
        self.provided = True


def enter(store: Store, layer: int, new: Entering, feedback: Tensor | None) -> None:
    """Stores a layer's new tokens; keys are rounded by `feedback` (feedback.py).

    Whether they are finite is seen at the next look at the device, as with steps of one token.

    Raises:
        MemoryError: the forward's tokens do not fit; the layer is as it was.
    """
    forward = Forward.of(store, layer, new)
    forward.provide(store)
    forward.left.discard(layer)
    rows = EnteredRows(
        store.table.table[layer],
        store.high_count[layer],
        store.window_key[layer],
        store.window_value[layer],
        store.window_score[layer],
        store.length[layer],
        store.window_start[layer],
        store.sink_end[layer],
        store.key_offset[layer],
        store.invalid,
        store.sink_slots,
    )
    enter_tokens(
        rows,
        store.pool.pages,
        store.layout,
        store.pool.free_list,
        new.key,
        new.value,
        rank=forward.rank,
        count=forward.count,
        window=store.config.window,
        limit=store.value_limit,
        key_rotation=store.key_rotation,
        value_rotation=store.value_rotation,
        centers=forward.centers[layer],
        holds=forward.longest[layer] > 0,
        feedback=feedback,
    )
    store.forget_bounds()
    store.steps_since_compaction = 0
