"""Number and length of slots, and the number of pages, as requests need them under a budget.

Slots and pages compete for memory. Short requests need many slots and few pages, long ones the reverse.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hf_diffkv.pages.layout import NARROW_POSITIONS

from .slot_part import SlotPart

# tokens that there is room for at first; divisors of the shares by which slots and tokens grow beyond the need
FIRST_TOKENS = 128
SLOTS_AHEAD, TOKENS_AHEAD = 8, 4


class PerSlot(Protocol):
    """Memory for every slot outside the stores."""

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Returns the bytes held with `slots` slots for requests of up to `tokens` tokens."""

    def resize(self, slots: int, tokens: int) -> None:
        """Changes to `slots` slots for up to `tokens` tokens, with room for all requests. Their content is kept."""

    def move(self, slot: int, to: int) -> None:
        """Moves the request in `slot` to the empty slot `to`."""


class SlotRoom:
    """Sizes of everything that slots consist of.

    Args:
        parts: parts with one slot each.
        others: objects that hold memory for every slot.
        most: largest number of slots.
        max_tokens: tokens of the longest allowed request.
        max_bytes: budget for everything that is held.

    Attributes:
        slots: number of slots.
        tokens: tokens of the longest request that tables and buffers have room for at the moment.
        longest: tokens of the longest request that is sure to fit when alone; at most `max_tokens`.
    """

    def __init__(
        self, parts: Sequence[SlotPart], others: Sequence[PerSlot], most: int, max_tokens: int, max_bytes: int
    ) -> None:
        self._parts, self._others = parts, others
        self.most, self.max_bytes = most, max_bytes
        self.slots, self.tokens = 1, parts[0].store.room
        # pages are allotted in the proportion in which a long request needs them
        self._costs = np.array([part.store.bytes_per_page for part in parts])
        weights = np.array([max(1, part.bounds.pages(max_tokens)) for part in parts]) * self._costs
        self._shares = weights / weights.sum()
        narrow = any(part.store.layout.high.position_bytes == 2 for part in parts)
        allowed = min(max_tokens, NARROW_POSITIONS) if narrow else max_tokens
        self.longest = bisect_left(range(allowed), True, key=lambda tokens: not self._fits_alone(tokens + 1))

    def _fits_alone(self, tokens: int) -> bool:
        limits = self.limits(1, tokens)
        # all but the null page
        return all(part.bounds.pages(tokens) <= limit - 1 for part, limit in zip(self._parts, limits))

    def limits(self, slots: int, tokens: int) -> np.ndarray:
        """Returns the page limit of each part with this many slots, including null pages, int64 [parts]."""
        beside = sum(part.store.bytes_beside_pages(slots, tokens) for part in self._parts)
        beside += sum(other.bytes_for(slots, tokens) for other in self._others)
        return np.floor((self.max_bytes - beside) * self._shares / self._costs).astype(np.int64)

    def share_out(self) -> None:
        """Sets each part's page limit for the current size. Raises `MemoryError` like `SlotPart.set_limit`."""
        self._set_limits(self.limits(self.slots, self.tokens))

    def sizes_for(self, slots: int, tokens: int) -> list[tuple[int, int]]:
        """Returns the sizes to try if at least these slots and tokens are needed, best first."""
        tokens = max(tokens, min(self.longest, FIRST_TOKENS))
        ahead = slots if slots <= self.slots else min(self.most, max(slots, self.slots + self.slots // SLOTS_AHEAD))
        longer = tokens if tokens <= self.tokens else min(self.longest, tokens + tokens // TOKENS_AHEAD)
        stays = (max(self.slots, slots), max(self.tokens, tokens))
        larger = (max(self.slots, ahead), max(self.tokens, longer))
        return [larger, stays, (slots, max(self.tokens, tokens)), (slots, tokens)]

    def change(self, slots: int, tokens: int) -> None:
        """Changes to `slots` slots for requests of up to `tokens` tokens. Slots that go must be empty.

        Pages in use and promised must be within `limits` of these sizes.

        Raises:
            MemoryError: the device has no memory, or cannot take any back; existing slots stay usable.
        """
        between = (min(slots, self.slots), min(tokens, self.tokens))
        try:
            for size in dict.fromkeys([between, (slots, tokens)]):
                self._set_limits(np.minimum(self.limits(*size), self.limits(self.slots, self.tokens)))
                try:
                    self._resize(*size)
                except BaseException:
                    # all must have the same size, including those already changed
                    self._resize(self.slots, self.tokens)
                    raise
                self.slots, self.tokens = size
        finally:
            self.share_out()

    def _resize(self, slots: int, tokens: int) -> None:
        for holder in (*self._parts, *self._others):
            holder.resize(slots, tokens)

    def _set_limits(self, limits: np.ndarray) -> None:
        for part, limit in zip(self._parts, limits):
            part.set_limit(int(limit))
