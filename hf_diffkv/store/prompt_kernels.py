"""Storage of prompts by kernels, and the host's bounds on such a forward, which need few looks at the device.

Non-finite keys or values are detected at the next look, as in decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.store_prompt.tokens import Placement, PromptTokens
from ..pages.pool import FREE
from .state import Changing, Store
from .transform import NewPrompt


def store_by_kernels(
    store: Store, layer: int, new: NewPrompt, received: Tensor | None, feedback: Tensor | None
) -> bool:
    """Stores a layer's new tokens; with token selection, also decides the levels of the earlier ones.

    Args:
        received: attention received by each key, float32 [batch, heads, P + Q], added to the sums first; None if the
            store selects no tokens.
        feedback: matrices used to round keys (`transform.feedback`), or None.

    Returns:
        False if, with token selection, fewer pages are available than may be needed. The layer is unchanged, and the
        tokens may still fit.

    Raises:
        MemoryError: without token selection, the tokens do not fit; the layer is unchanged.
    """
    forward = PromptPlan.of(store, layer, new)
    try:
        forward.provide(store, layer)
    except MemoryError:
        if received is None:
            raise
        return False
    # imports Triton, which only kernels need
    from ..ops.store_prompt.launch import store_prompt

    tokens = PromptTokens(new.key, new.value, forward.rank, forward.count)
    # a layer's first attention, which comes after the plan, shows whether it is centred
    centers = forward.centers[layer] and layer not in store.uncentered
    placement = Placement(store.config.window, store.value_limit, store.rotation, centers, feedback)
    with Changing(store):
        store_prompt(store.rows(layer), tokens, placement, forward.longest[layer], received)
    store.forget_bounds()
    return True


def pages_of(tokens: np.ndarray, capacity: int | np.ndarray) -> np.ndarray:
    """Returns the number of pages of `capacity` tokens that hold `tokens` tokens, elementwise."""
    return -(-tokens // capacity)


@dataclass
class PromptPlan:
    """Counts and bounds that the host has for a store's layers in a forward of several tokens.

    Attributes:
        tokens: new tokens per request, padding included.
        rank, count: rank of each new token and number of real ones, as in `PromptTokens`.
        longest: length of each layer's longest row before the forward, window included.
        centers: whether each layer has a row to be centred, unless its attention forbids it.
        pages: pages each layer lacks; with token selection an upper bound, before any page is freed.
        free: free pages; with token selection a lower bound.
        width: upper bound on the stored tokens of the longest row after the forward; sets the page table's width.
        left: layers that have not stored their tokens yet.
        ready: whether the first layer has made room.
        looked: whether `free` is still exact.
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
    def of(cls, store: Store, layer: int, new: NewPrompt) -> PromptPlan:
        """Returns the current forward's record, read from the device if this is its first layer.

        Raises:
            ValueError: an earlier forward stored keys or values that are not finite.
        """
        known, tokens = store.forward, new.key.shape[2]
        same = known is not None and known.tokens == tokens and (known.rank is None) == (new.valid is None)
        if not same or layer not in known.left:
            store.forward = cls.read(store, tokens, new.valid)
        return store.forward

    @classmethod
    def read(cls, store: Store, tokens: int, valid: Tensor | None) -> PromptPlan:
        rank = count = None
        if valid is not None:
            rank = torch.where(valid, valid.cumsum(-1, dtype=torch.int32) - 1, -1).to(torch.int32)
            count = valid.sum(-1)
        parts = [store.high_count, store.low_count, store.length, store.window_start, store.sink_end]
        # in other layouts, all rows are high, or have both tiers
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
            centers.tolist(),
            lacking.sum((1, 2)).tolist(),
            int(free),
            int((longest + new_start - start).max()) + store.window_slots,
            set(range(store.num_layers)),
        )

    def provide(self, store: Store, layer: int) -> None:
        """Makes room for the new tokens of `layer` and removes it from `left`.

        Without token selection, the first layer makes room for all layers. With it, only the device knows how many
        pages a layer takes. If the lower bound on free pages is too small, the host reads the free count and makes
        room for the most that a quarter of the remaining layers may take.

        Raises:
            MemoryError: there is no room; only the width of the page table may have changed.
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
            for pages in (sum(self.pages[each] for each in ahead), need):
                try:
                    store.pool.ensure_free(pages, self.free)
                except MemoryError:
                    continue
                self.free = max(self.free, pages)
                break
            else:
                # the caller stores the layer without kernels
                self.free, self.looked = 0, False
                raise MemoryError(f"{need} free pages are needed for a layer's new tokens.")
        self.free, self.looked = self.free - need, False


def _lacking_pages(
    store: Store, high: np.ndarray, low: np.ndarray, leaving: np.ndarray, low_heads: np.ndarray | None = None
) -> np.ndarray:
    """Returns an upper bound on the pages each row lacks, int64 [layers, batch, heads].

    Args:
        high, low: stored tokens of each tier, int64 [layers, batch, heads].
        leaving: tokens that leave the window, int64, broadcastable to the same shape.
        low_heads: nonzero for rows that store all tokens in the low tier, int64 of the same shape; None if no row does.
    """
    capacity, low_capacity = store.layout.high.capacity, store.layout.low.capacity
    if not store.layout.selects:
        held, of_row = high + low, capacity if low_heads is None else np.where(low_heads, low_capacity, capacity)
        return pages_of(held + leaving, of_row) - pages_of(held, of_row)
    # a row gains at most the tokens that leave its window; if the high tier gains none, all high tokens may be demoted
    gains = pages_of(leaving, min(capacity, low_capacity)) + (leaving > 0)
    sinks = pages_of(high + low + leaving, low_capacity) - pages_of(low, low_capacity)
    return np.maximum(gains, sinks)
