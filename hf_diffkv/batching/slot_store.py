"""The store behind slots: its host looks before every step and knows beforehand which rows may take a page."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..config import Threshold
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
        full = (high % high_size == 0) | (low % low_size == 0) & (has_low != 0)
        return full, -(-high // high_size) - (-low // low_size)

    def set_all_thresholds(self, alpha_high: Threshold, alpha_low: Threshold) -> None:
        """Thresholds of every layer, in any of `DiffKVConfig`'s forms; raises as `set_thresholds` does."""
        for name, alpha in (("alpha_high", alpha_high), ("alpha_low", alpha_low)):
            if isinstance(alpha, tuple) and len(alpha) != self.num_layers:
                raise ValueError(
                    f"{name} has {len(alpha)} entries but {self.num_layers} layers of this model are compressed; give "
                    f"one number or {self.num_layers} of them."
                )
        for layer in range(self.num_layers):
            of_layer = (alpha[layer] if isinstance(alpha, tuple) else alpha for alpha in (alpha_high, alpha_low))
            self.set_thresholds(layer, *of_layer)

    def pages_within(self, max_bytes: int, max_tokens: int) -> int:
        """How many pages, the null page included, fit beside all else that is ever held; may be negative.

        Args:
            max_tokens: of the longest request.
        """
        other = self.bytes_beside_pool() - self._tile_bytes_held() + self._most_tile_bytes(max_tokens)
        pool = self.pool.granularity + 8 * self.pool.free_list.state.numel()
        # a page and its entry in the free list
        return (max_bytes - other - pool) // (self.layout.page_bytes + 4)

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
