"""The store behind slots: its host looks before every step and knows beforehand which rows may take a page."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..ops.backend import REFERENCE
from ..ops.tiles import TILE_TOKENS
from ..store.compaction import settle
from ..store.state import Store, read_together
from ..store.step import bound_rows

# a step of one token and the compaction behind it
LOOKAHEAD = 1
# row and first page of a tile
TILE_BYTES = 16


class SlotStore(Store):
    """A store whose pages are reserved by others (slots.py); it takes one for each row that `look` names at most."""

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        """Runs the compaction that is due and reads counts, for the next step.

        Returns:
            bool [layers, slots, heads], rows that may need a page for a token that leaves the window, and int64
            [layers, slots, heads], how many pages they hold.
        """
        settle(self)
        has_low = self.policy.has_low(self.alpha_high, self.alpha_low)
        high, low, has_low, flag = read_together(self.high_count, self.low_count, has_low, self.flag)
        self.raise_for(False, False, bool(flag))
        bound_rows(self, high, low, LOOKAHEAD)
        self.steps_left = LOOKAHEAD
        high_size, low_size = self.layout.high.capacity, self.layout.low.capacity
        has_low = has_low != 0
        # where no token is chosen, all of a row are of one tier
        has_high = ~has_low | self.layout.selects
        full = (high % high_size == 0) & has_high | (low % low_size == 0) & has_low
        return full, -(-high // high_size) - (-low // low_size)

    def check_positions(self, tokens: int) -> None:
        """Nothing to check: `seen` counts steps of many requests, none of which is longer than `Slots.longest`."""

    def page_tokens(self) -> np.ndarray:
        """int64 [layers, heads], how many tokens of a row every page but its last ones holds at least."""
        high, low = self.layout.high.capacity, self.layout.low.capacity
        if self.layout.selects:
            return np.full((self.num_layers, self.num_heads), min(high, low))
        return np.where(self.low_heads[:, 0].cpu().numpy(), low, high)

    def bytes_beside_pages(self, max_tokens: int) -> int:
        """The most that is ever held beside pages and their entries in the free list.

        Args:
            max_tokens: of the longest request.
        """
        other = self.bytes_beside_pool() - self._tile_bytes_held() + self._most_tile_bytes(max_tokens)
        return other + self.pool.granularity + 8 * self.pool.free_list.state.numel()

    @property
    def bytes_per_page(self) -> int:
        """Of a page and its entry in the free list."""
        return self.layout.page_bytes + 4

    def _tile_bytes_held(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.bound_tensors())

    def _most_tile_bytes(self, max_tokens: int) -> int:
        """What the reference's work is cut into takes at most, for all layers together and for each."""
        if self.backend() != REFERENCE:
            return 0
        rows = 2 * self.num_layers * self.rows_per_layer
        sizes = (self.layout.high.capacity, self.layout.low.capacity)
        tiles = sum(-(-(max_tokens + LOOKAHEAD) // (max(1, TILE_TOKENS // size) * size)) + 1 for size in sizes)
        return rows * tiles * TILE_BYTES

    def spoiled(self, slots: Tensor) -> list[int]:
        """Which of `slots`, int64 [n], hold keys or values that cannot be stored; forgets that there were any."""
        if not bool(self.invalid):
            return []
        self.invalid.zero_()
        peaks = [window[:, slots].abs().amax((0, 2, 3, 4)) for window in (self.window_key, self.window_value)]
        good = (peaks[0] <= self.value_limit) & (peaks[1] <= self.value_limit)
        return slots[~good].tolist()
