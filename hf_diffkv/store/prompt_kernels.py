"""Prompts that kernels store, and what the host knows of such a forward from few looks at the device.

Whether new tokens are finite is seen at the next look, as with steps of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.prompt_tokens import Placement, PromptTokens
from ..pages.pool import FREE
from .forms import Entering
from .state import Store


def store_by_kernels(store: Store, layer: int, new: Entering, received: Tensor | None, feedback: Tensor | None) -> bool:
    """Stores a layer's new tokens, keys rounded by `feedback` (forms.py); levels its past where tokens are chosen.

    Args:
        received: float32 [batch, heads, P + Q], added to sums first; None where no token is chosen.

    Returns:
        False where the most pages that a layer with chosen tokens may lack are not there: it is as it was, and may
        fit nevertheless.

    Raises:
        MemoryError: tokens of which none is chosen do not fit; the layer is as it was.
    """
    forward = Forward.of(store, layer, new)
    try:
        forward.provide(store, layer)
    except MemoryError:
        if received is None:
            raise
        return False
    rows, tokens = store.rows(layer), PromptTokens(new.key, new.value, forward.rank, forward.count)
    centers = forward.centers[layer]
    placement = Placement(store.config.window, store.value_limit, store.rotation, centers, feedback)
    if received is None:
        from ..ops.store_uniform.launch import store_uniform

        store_uniform(rows, tokens, placement, holds=forward.longest[layer] > 0)
    else:
        from ..ops.store_by_thresholds.launch import store_by_thresholds

        store_by_thresholds(rows, tokens, placement, received)
    store.forget_bounds()
    return True


def pages_of(tokens: np.ndarray, capacity: int | np.ndarray) -> np.ndarray:
    """How many pages of `capacity` tokens each they take."""
    return -(-tokens // capacity)


@dataclass
class Forward:
    """What the host knows of the layers of a store before a forward of several tokens.

    Attributes:
        tokens: new ones of each request, padding included.
        rank, count: of the new tokens, as the ops take them.
        longest: tokens of each layer's longest row, window included. centers: layers with a row to be centred.
        pages: that each layer lacks; where tokens are chosen, the most that it may lack before it gives any back.
        free: pages that are free; where tokens are chosen, that are at least. looked: nothing has changed since then.
        width: tokens of the longest row afterwards, as its table must hold them; the most that they may be.
        left: layers whose tokens are still to come.
    """

    tokens: int
    rank: Tensor | None
    count: Tensor | None
    longest: list[int]
    centers: list[bool]
    pages: list[int]
    free: int
    width: int
    left: set[int]
    ready: bool = False
    looked: bool = True

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
        parts = [store.high_count, store.low_count, store.length, store.window_start, store.sink_end]
        # elsewhere all rows are high, or of both tiers
        parts += [] if store.layout.selects or store.layout.one_tier else [store.low_heads]
        real = torch.full_like(store.length[0], tokens) if count is None else count
        free = store.pool.free_list.state[FREE]
        free, real, high, low, length, start, end, *low_heads = store.look(free, real, *parts)
        after = length + real
        new_start = np.maximum(start, after - store.config.window)
        lacking = _lacking_pages(store, high, low, (new_start - start)[..., None], *low_heads)
        due = (start == end) & (after - start > store.config.window)
        centers = store.config.center & due.any(1)
        longest = (high + low).max(-1)
        held = longest + np.maximum(length - start, 0) + np.minimum(length, end)
        return cls(
            tokens,
            rank,
            count,
            held.max(1).tolist(),
            [bool(centers[layer]) and layer not in store.uncentered for layer in range(store.num_layers)],
            lacking.sum((1, 2)).tolist(),
            int(free),
            int((longest + new_start - start).max()) + store.window_slots,
            set(range(store.num_layers)),
        )

    def provide(self, store: Store, layer: int) -> None:
        """Makes room for what `layer` stores next, which is then left no more.

        Where no token is chosen, the first layer makes room for all. Elsewhere what a layer takes is only known on the
        device: where the pages that are surely free may not do, the host looks how many there are, and provides what a
        quarter of the layers that are left may take at most.

        Raises:
            MemoryError: there is no room; nothing has changed then but the width of the page table.
        """
        if not self.ready:
            store.ensure_width(self.width)
            store.update_limit()
            if not store.layout.selects:
                store.pool.ensure_free(sum(self.pages), self.free)
            self.ready = True
        try:
            if store.layout.selects:
                self._provide_most(store, layer)
        finally:
            self.left.discard(layer)

    def _provide_most(self, store: Store, layer: int) -> None:
        need = self.pages[layer]
        if self.free < need:
            if not self.looked:
                self.free = store.pool.free_list.free
            ahead = [layer, *sorted(self.left - {layer})][: -(-len(self.left) // 4)]
            pages = sum(self.pages[each] for each in ahead)
            try:
                store.pool.ensure_free(pages, self.free)
            except MemoryError:
                self._provide_one(store, need)
            else:
                self.free = max(self.free, pages)
        self.free, self.looked = self.free - need, False

    def _provide_one(self, store: Store, need: int) -> None:
        try:
            store.pool.ensure_free(need, self.free)
        except MemoryError:
            # the layer is then stored in another way
            self.free, self.looked = 0, False
            raise
        self.free = max(self.free, need)


def _lacking_pages(
    store: Store, high: np.ndarray, low: np.ndarray, leaving: np.ndarray, low_heads: np.ndarray | None = None
) -> np.ndarray:
    """Pages that each row lacks at most, int64 [layers, batch, heads], as `leaving` tokens leave its window.

    Args:
        low_heads: rows of which all is low, int64 of the same shape; None where there are none.
    """
    capacity, low_capacity = store.layout.high.capacity, store.layout.low.capacity
    if not store.layout.selects:
        held, of_row = high + low, capacity if low_heads is None else np.where(low_heads, low_capacity, capacity)
        return pages_of(held + leaving, of_row) - pages_of(held, of_row)
    # a row gains at most what leaves its window; where the high tier gains nothing, all that is high may sink
    gains = pages_of(leaving, min(capacity, low_capacity)) + (leaving > 0)
    sinks = pages_of(high + low + leaving, low_capacity) - pages_of(low, low_capacity)
    return np.maximum(gains, sinks)
