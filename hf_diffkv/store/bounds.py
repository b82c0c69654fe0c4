"""The host's knowledge of a store: bounds on the counts, and room for the steps they cover."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.backend import REFERENCE
from ..ops.tiles import Bounds, build_tiles
from ..pages import HIGH, LOW
from ..pages.free_list import FREE
from .budget import make_room
from .held import Held
from .look import pages_of, read_together
from .window import is_whole

# Generated tokens between two looks at the device; the host works with upper bounds in between.
REFRESH_STEPS = 8


class HostBounds(Held):
    """What the host can say between two looks at the device, and how many pages `max_bytes` leaves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._high_bound = np.zeros(self.high_count.shape, dtype=np.int64)
        self._low_bound = np.zeros_like(self._high_bound)
        self._steps_left = 0
        self._bounds: list[Bounds] = []
        self.all_bounds: Bounds | None = None
        self.update_limit()

    def _tensors(self) -> list[Tensor]:
        bounds = [*self._bounds, self.all_bounds] if self.all_bounds is not None else []
        return super()._tensors() + [t for bound in bounds for t in bound.tensors()]

    @property
    def max_bytes(self) -> int | None:
        """What the other stores of the device leave of the budget; None is unlimited."""
        limit = self.config.max_bytes
        return None if limit is None else limit - self.taken

    def check_budget(self, more: int) -> None:
        """Raises `MemoryError` unless `more` bytes outside the pool fit into the budget; sets the pool's limit."""
        self.update_limit(more)
        if self.config.max_bytes is not None and more > 0 and self.bytes + more > self.max_bytes:
            raise MemoryError(
                f"{more} more bytes do not fit into max_bytes={self.config.max_bytes}; raise max_bytes, or use fewer "
                "sequences."
            )

    def update_limit(self, more: int = 0) -> None:
        """Says how many pages fit beside everything else that is held, and `more` bytes to come.

        Raises:
            MemoryError: none does.
        """
        max_bytes = self.max_bytes
        if max_bytes is None:
            return
        # what may still be added until the limit is looked at again
        growth = self.padding.bytes // 8 + self.batch_size * (REFRESH_STEPS + 1) + self.config.max_bytes // 32
        growth += self.pool.granularity
        other = self._bytes_beside_pool() + growth + more
        pages = (max_bytes - other) // (self.layout.page_bytes + 8)
        if pages < 1:
            raise MemoryError(
                f"max_bytes={self.config.max_bytes} cannot even hold the windows and tables of this cache ({other} "
                "bytes); raise max_bytes, or lower window, sinks or the batch size."
            )
        self.pool.max_pages = int(pages)

    @property
    def look_due(self) -> bool:
        """Whether the next generated token makes the host look at the device, and so may raise."""
        return self._steps_left == 0

    def refresh_if_due(self) -> None:
        """Looks at the device where the host's bounds do not cover another step. Raises as `begin` does."""
        if self.look_due:
            self.refresh()

    def refresh(self) -> None:
        """Makes room for the next `REFRESH_STEPS` steps. Reads the device once, and once more where the pool grows."""
        lookahead = REFRESH_STEPS + self.config.compaction_interval
        self._high_bound, self._low_bound, has_low, first_leave, free = self._look(lookahead)
        self.centers_soon = first_leave and self.config.center and len(self.uncentered) < self.num_layers
        high, low = self.layout.high.capacity, self.layout.low.capacity
        pages_now = pages_of(self._high_bound, high) + pages_of(self._low_bound, low)
        low_growth = np.where(has_low, lookahead, 0)
        pages_then = pages_of(self._high_bound + lookahead, high), pages_of(self._low_bound + low_growth, low)
        self._bound_rows(lookahead)
        self.ensure_width(max(int((self._high_bound + self._low_bound).max()) + lookahead, self.room))
        if self.room > 0:
            self.pool.free_list.reserve(self.table.table.numel())
        self.update_limit()
        self._ensure_free(int((pages_then[HIGH] + pages_then[LOW] - pages_now).sum()), free)
        self._steps_left = REFRESH_STEPS

    def _bound_rows(self, lookahead: int) -> None:
        """Notes how long rows are until `lookahead` more tokens have left their windows."""
        longest = int((self._high_bound + self._low_bound).max()) + lookahead + self.window_slots
        if self.backend() != REFERENCE:
            self.all_bounds = Bounds(longest)
            self._bounds = [self.all_bounds] * self.num_layers
        else:
            self.all_bounds = self._tile(slice(None), longest, lookahead)
            self._bounds = [self._tile(layer, longest, lookahead) for layer in range(self.num_layers)]

    def _look(self, lookahead: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool, int]:
        """All the host wants to know, in one copy: high and low counts, where low ones may come, bool, free pages.

        The first three are [layers, batch, heads]. The single bool is whether the first token of some row can leave
        its window within `lookahead` tokens. Raises as `check_values` does.
        """
        has_low = self.policy.has_low(self.alpha_high, self.alpha_low)
        first_leave = (is_whole(self) & (self.length - self.window_start > self.config.window - lookahead)).any()
        parts = (self.high_count, self.low_count, has_low, first_leave, self.pool.free_list.state[FREE])
        high, low, has_low, leave, free, *flags = read_together(*parts, *self.flags())
        self.raise_for(*map(bool, flags))
        return high, low, has_low.astype(bool), bool(leave), int(free)

    def _ensure_free(self, pages: int, free: int) -> None:
        try:
            self.pool.ensure_free(pages, free)
        except MemoryError:
            if self.config.max_bytes is None:
                raise
            make_room(self, pages)
            self.refresh()

    def _tile(self, layers: slice | int, longest: int, lookahead: int) -> Bounds:
        tiers = ((self._high_bound, self.layout.high.capacity), (self._low_bound, self.layout.low.capacity))
        tiles = (build_tiles(counts[layers].ravel(), lookahead, capacity, self.device) for counts, capacity in tiers)
        return Bounds(longest, tuple(tiles))

    def bounds(self, layer: int) -> Bounds:
        """What the host knows of one layer's rows, valid until the next refresh."""
        return self._bounds[layer]

    def ensure_width(self, tokens: int) -> None:
        """Makes table rows wide enough for `tokens` stored tokens."""
        high = self.layout.high.capacity
        high_pages = (self.high_count + (high - 1)) // high
        self.table.ensure_width(tokens, min(high, self.layout.low.capacity), high_pages)

    def forget_bounds(self) -> None:
        """Says that counts changed in a way the host's bounds do not cover."""
        self._steps_left = 0

    def scratch_fits(self) -> bool:
        """Whether the buffers between the kernels serve the next step."""
        return self.scratch is not None and self.scratch.max_tokens >= self.bounds(0).max_tokens

    def check_values(self) -> None:
        """Reads the device.

        Raises:
            ValueError: since the last look a step of one token (or a prompt, see forward.py) stored keys or values that
                are not finite, or a step had a mask for the tokens before it that differs from what is stored.
        """
        self.raise_for(*torch.stack([flag.reshape(()) != 0 for flag in self.flags()]).tolist())

    def flags(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `raise_for` takes, as it stands on the device."""
        return self.invalid, self.changed_past, self.flag

    def raise_for(self, invalid: bool, changed_past: bool, flag: bool) -> None:
        """Raises as `check_values` does."""
        if invalid:
            raise ValueError(self.value_message())
        if changed_past:
            raise ValueError(
                "the attention mask of a step of one token hides tokens that are stored, or shows some that are not. "
                "On this device tokens can be hidden only together with a forward of several tokens; what was "
                "generated since then is wrong. Call cache.reset() and start over."
            )
        if flag:
            raise RuntimeError(
                "a compaction found too few pages, which the host should have provided; please report it."
            )
