"""Reservations of pages in a pool that several owners share.

Pages that a compaction or a prompt is going to need are promised to it in advance, at most as many as the pool can
still provide. No owner then takes pages that another one counts on, or runs short halfway.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hf_diffkv.pages import PagePool


class Reservations:
    """Pages promised to owners, out of those that are free or that the pool may still grow by.

    Args:
        pool: pool with a limit, `max_pages`.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._promised: dict[Hashable, int] = {}
        self._free: int | None = None

    @property
    def unreserved(self) -> int:
        """Pages that may still be promised."""
        if self._free is None:
            self._free = self.pool.free_list.free
        return self._free + self.pool.max_pages - self.pool.capacity - self.all_promised

    @property
    def all_promised(self) -> int:
        """Number of pages that all owners may still take."""
        return sum(self._promised.values())

    def look_again(self) -> None:
        """Notes that pages were taken or given back."""
        self._free = None

    def reserve(self, owner: Hashable, pages: int) -> bool:
        """Promises `pages` pages to `owner` in place of its earlier ones. Returns False if there are too few."""
        if pages - self.promised(owner) > self.unreserved:
            return False
        self._promised[owner] = pages
        return True

    def promised(self, owner: Hashable) -> int:
        """Returns the number of pages that `owner` may still take."""
        return self._promised.get(owner, 0)

    def withdraw(self, owner: Hashable) -> None:
        """Takes back what was promised to `owner`, if anything was."""
        self._promised.pop(owner, None)

    def rename(self, owner: Hashable, to: Hashable) -> None:
        """Passes the pages promised to `owner` on to `to`, which has none."""
        if owner in self._promised:
            self._promised[to] = self._promised.pop(owner)

    def clear(self) -> None:
        """Takes back every promise."""
        self._promised.clear()
        self.look_again()

    def provide(self) -> None:
        """Makes the pool hold what is promised. Raises `MemoryError` if the device has no memory."""
        self.pool.ensure_free(sum(self._promised.values()))
        self.look_again()

    def take(self, owner: Hashable, pages: int) -> None:
        """Notes that `owner` takes `pages` pages.

        Raises:
            MemoryError: more pages than it was promised; nothing has changed then.
        """
        left = self.promised(owner) - pages
        if left < 0:
            raise MemoryError(f"{pages} pages are needed but only {self.promised(owner)} are reserved for them.")
        self._promised[owner] = left
        self.look_again()


class ReservedPool:
    """View of a pool for one owner, which gets what it was promised and no more."""

    def __init__(self, reservations: Reservations, owner: Hashable) -> None:
        self._reservations, self._owner = reservations, owner

    def ensure_free(self, count: int, free: int | None = None) -> None:
        """Takes `count` promised pages. Raises `MemoryError` like `Reservations.take`."""
        self._reservations.take(self._owner, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reservations.pool, name)
