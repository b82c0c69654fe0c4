"""The store behind slots. The host reads it before every step and knows in advance which rows may take a page."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_diffkv.ops.backend import REFERENCE
from hf_diffkv.ops.tiles import TILE_TOKENS
from hf_diffkv.pages import NULL_PAGE
from hf_diffkv.pages.rows import ROW_STATE
from hf_diffkv.store.compaction import settle
from hf_diffkv.store.decode import planned_scratch, prepare_scratch
from hf_diffkv.store.faults import too_few_pages
from hf_diffkv.store.host_reads import read_together
from hf_diffkv.store.state import Padding, Store
from hf_diffkv.store.step import bound_rows

from .growing import GrowingTensor

# a step of one token and the compaction after it
LOOKAHEAD = 1
# row and first page of a tile
TILE_BYTES = 16
# largest tensors of a slot, apart from its part of the page table
GROWING_TENSORS = ("window_key", "window_value", "window_score")


class SlotStore(Store):
    """A store whose pages are reserved elsewhere (slots.py). It takes at most one for each row that `look` names.

    It has one slot at first, for a request of one token; `resize` changes both.

    Attributes:
        counts, final: tokens of each row outside its window, and whether they are at the low precision if no token is
            chosen, as `look` has read them; [layers, slots, heads].
    """

    counts: np.ndarray
    final: np.ndarray

    def begin(self, query_heads: int) -> None:
        """Makes room for a request of one token and for tensors that slots share. Thresholds must already be set.

        Args:
            query_heads: number of query heads of a layer.
        """
        self._query_heads = query_heads
        # state of a slot without a request, if not zero
        names = ("alpha_high", "alpha_low", "sink_end", "window_start")
        self._empty = {name: getattr(self, name)[:, 0].clone() for name in names}
        self._growing = {name: GrowingTensor(getattr(self, name)) for name in GROWING_TENSORS}
        self._growing["table"] = GrowingTensor(self.table.table)
        # tokens that a slot gets one by one are generated ones
        self.seen = 1
        self.resize(1, 1)

    @property
    def bytes(self) -> int:
        """Bytes the device holds."""
        return self.pool.bytes + self.bytes_outside_pool() + sum(t.slack for t in self._growing.values())

    def look(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs the compaction that is due and reads counts, for the next step.

        Returns:
            bool [layers, slots, heads], rows that may need a page for a token that leaves the window; and int64 of the
            same shape, how many pages they hold, and how many of these are not full.
        """
        settle(self)
        has_low = self.may_lower()
        high, low, has_low, flag = read_together(self.high_count, self.low_count, has_low, self.flag)
        if flag:
            raise too_few_pages()
        bound_rows(self, high, low, LOOKAHEAD)
        self.steps_left = LOOKAHEAD
        high_size, low_size = self.layout.high.capacity, self.layout.low.capacity
        has_low = has_low != 0
        self.counts, self.final = high + low, has_low
        # if no token is chosen, all tokens of a row are in one tier
        has_high = ~has_low | self.layout.selects
        full = (high % high_size == 0) & has_high | (low % low_size == 0) & has_low
        partial = (high % high_size > 0).astype(np.int64) + (low % low_size > 0)
        return full, high // high_size + low // low_size + partial, partial

    def check_positions(self, tokens: int) -> None:
        """Does nothing: `seen` counts steps of many requests, none of which is longer than `Slots.longest`."""

    def page_tokens(self) -> np.ndarray:
        """Returns int64 [layers, heads], the minimum tokens in a page of a row, except its last ones."""
        high, low = self.layout.high.capacity, self.layout.low.capacity
        if self.layout.selects:
            return np.full((self.num_layers, self.num_heads), min(high, low))
        return np.where(self.low_heads[:, 0].cpu().numpy(), low, high)

    def resize(self, slots: int, tokens: int) -> None:
        """Makes room for `slots` requests of up to `tokens` tokens. The first slots keep their content.

        New slots are empty. Only after `look`, which is due again.

        Raises:
            MemoryError: the device has no memory. Some tensors have changed; a `resize` to the old size undoes it.
        """
        self.scratch = self.all_bounds = self._kept = None
        self.layer_bounds = []

        def place(layer: int, fresh: Tensor, held: Tensor) -> None:
            kept = min(slots, held.shape[0])
            fresh[:kept] = held[:kept]

        def place_entries(layer: int, fresh: Tensor, held: Tensor) -> None:
            kept = min(slots, held.shape[0])
            high = -(-self.high_count[layer, :kept, :, None] // self.layout.high.capacity)
            left = torch.arange(held.shape[-1], device=self.device) < high
            width = min(fresh.shape[-1], held.shape[-1])
            entries = held[:kept]
            fresh[:kept, :, :width] = torch.where(left, entries, NULL_PAGE)[..., :width]
            fresh[:kept, :, -width:] += torch.where(left, NULL_PAGE, entries)[..., -width:]

        table = self._growing["table"]
        table.resize((self.num_layers, slots, self.num_heads, self.width_for(tokens)), place_entries)
        self.table.table = table.tensor
        for name in ROW_STATE:
            state = getattr(self, name)
            if name in self._growing:
                self._growing[name].resize((state.shape[0], slots, *state.shape[2:]), place)
                setattr(self, name, self._growing[name].tensor)
            elif slots != state.shape[1]:
                kept = min(slots, state.shape[1])
                fresh = state.new_zeros(state.shape[0], slots, *state.shape[2:])
                fresh[:, :kept] = state[:, :kept]
                if name in self._empty:
                    fresh[:, kept:] = self._empty[name][:, None]
                setattr(self, name, fresh)
        self.batch_size, self.room = slots, tokens
        self.padding = Padding(slots, self.device)
        prepare_scratch(self, self._query(slots))

    def empty(self, slot: int) -> None:
        """Resets a slot, whose pages were given back, to one without a request."""
        self.table.table[:, slot] = NULL_PAGE
        for name in ROW_STATE:
            getattr(self, name)[:, slot] = self._empty.get(name, 0)

    def move(self, slot: int, to: int) -> None:
        """Moves a slot's content, including pages, to the empty slot `to`."""
        self.table.table[:, to] = self.table.table[:, slot]
        for name in ROW_STATE:
            state = getattr(self, name)
            state[:, to] = state[:, slot]
        self.empty(slot)

    def width_for(self, tokens: int) -> int:
        """Returns the entries in a row of the table for requests of `tokens` tokens."""
        return -(-(tokens + self.window_slots) // min(self.layout.high.capacity, self.layout.low.capacity)) + 2

    def bytes_beside_pages(self, slots: int, tokens: int) -> int:
        """Returns the peak bytes held in addition to pages and their entries in the free list.

        Args:
            slots: number of slots.
            tokens: tokens of the longest request that there is room for.
        """
        table = 4 * self.num_layers * slots * self.num_heads * self.width_for(tokens)
        state = sum(t.numel() * t.element_size() for t in (getattr(self, name) for name in ROW_STATE))
        # more is taken while tensors are copied because they cannot grow in place
        copied = [t.tensor.numel() * t.tensor.element_size() for t in self._growing.values() if not t.grows_in_place]
        taken = sum(max(t.granularity, t.slack) for t in self._growing.values())
        slack = self.pool.granularity + taken + max(copied, default=0)
        other = slots * (state // self.batch_size) + table + planned_scratch(self, self._query(1), slots, tokens)
        return other + self._most_tile_bytes(slots, tokens) + slack + self._fixed_bytes

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page, its entry in the free list, and the count of its owners if pages may be shared."""
        return self.layout.page_bytes + 4 + (0 if self.layout.selects else 2)

    @property
    def _fixed_bytes(self) -> int:
        fixed = [self.layer_index, self.head_index, self.invalid, self.changed_past, self.flag]
        fixed += [] if self.lowering.moments is None else [self.lowering.moments]
        return sum(t.numel() * t.element_size() for t in [*fixed, self.pool.free_list.state])

    def _query(self, slots: int) -> Tensor:
        """Returns an empty query, of which only shape, dtype and device matter."""
        return torch.empty(slots, self._query_heads, self.key_dim, dtype=self.dtype, device=self.device)

    def _most_tile_bytes(self, slots: int, tokens: int) -> int:
        """Returns the peak bytes of the reference's tiles, for all layers together and for each."""
        if self.ops.backend != REFERENCE:
            return 0
        rows = 2 * self.num_layers * slots * self.num_heads
        sizes = (self.layout.high.capacity, self.layout.low.capacity)
        tiles = sum(-(-(tokens + LOOKAHEAD) // (max(1, TILE_TOKENS // size) * size)) + 1 for size in sizes)
        return rows * tiles * TILE_BYTES

    def spoiled(self, slots: Tensor) -> list[int]:
        """Returns which of `slots`, int64 [n], have keys or values that cannot be stored, and clears the flag."""
        if not bool(self.invalid):
            return []
        self.invalid.zero_()
        peaks = [window[:, slots].abs().amax((0, 2, 3, 4)) for window in (self.window_key, self.window_value)]
        good = (peaks[0] <= self.value_limit) & (peaks[1] <= self.value_limit)
        return slots[~good].tolist()
