"""All pages of one device: the bytes, which are free, and how they grow.

Free pages are coordinated by prefix sums (DiffKV, section 5): the ids that nobody owns stand in one ring on the device,
and each row's demand becomes its own disjoint range of the ring by a prefix sum over all rows, without locks and
without a loop over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reserve import reserve

NULL_PAGE = 0
# entries of `FreeList.state`
START, FREE, CAPACITY = 0, 1, 2
# pages that are copied together where some have to move
PAGES_AT_ONCE = 256


class PagePool:
    """Unified pages of `page_bytes` each. Page 0 is the null page and is never given out.

    Args:
        page_bytes: size of a page.
        device: where the pages live.
        max_pages: pages that may exist, the null page included; None is unlimited.
    """

    def __init__(self, page_bytes: int, device: torch.device, max_pages: int | None = None) -> None:
        self.page_bytes = page_bytes
        self.device = device
        self.max_pages = max_pages
        self.free_list = FreeList(device)
        self.capacity = 0
        # owners beyond the first, by page; None until something is shared
        self.sharers: Tensor | None = None
        self._reservation = reserve(device)
        self._add_pages(1)

    @property
    def grows_in_place(self) -> bool:
        """Whether pages stay where they are when the pool grows."""
        return self._reservation.grows_in_place

    @property
    def granularity(self) -> int:
        """Memory for pages is taken in multiples of so many bytes; 0 where it does not matter."""
        return self._reservation.granularity

    @property
    def slack(self) -> int:
        """Bytes held behind the pages that exist."""
        return self._reservation.slack

    @property
    def pages(self) -> Tensor:
        """uint8 [at least capacity, page_bytes]; only the first `capacity` pages may be used."""
        flat = self._reservation.tensor
        count = flat.numel() // self.page_bytes
        return flat[: count * self.page_bytes].view(count, self.page_bytes)

    @property
    def address(self) -> int:
        """Where the first page is."""
        return self._reservation.tensor.data_ptr()

    @property
    def bytes(self) -> int:
        """Bytes held: every page that exists, what is mapped for the next ones, and the free list."""
        ring = self.free_list.ring
        sharers = 0 if self.sharers is None else 2 * self.sharers.numel()
        pages = self.capacity * self.page_bytes + self._reservation.slack
        return pages + 4 * ring.numel() + 8 * self.free_list.state.numel() + sharers

    def ensure_free(self, count: int, free: int | None = None) -> None:
        """Makes sure that `count` pages can be taken; grows by what is missing.

        Args:
            free: how many pages are free; None reads the device.

        Raises:
            MemoryError: `max_pages` would be exceeded, or the device has no memory; nothing has changed then.
        """
        missing = count - (self.free_list.free if free is None else free)
        if missing <= 0:
            return
        allowed = missing if self.max_pages is None else self.max_pages - self.capacity
        if missing > allowed:
            raise MemoryError(
                f"the cache needs {missing} more pages of {self.page_bytes} bytes but its limit of {self.max_pages} "
                "pages is reached; raise max_bytes, lower the thresholds' demand (larger alpha_low), or use a "
                "smaller batch."
            )
        self._add_pages(missing)

    def truncate(self, capacity: int, table: Tensor) -> None:
        """Gives back the memory of all but `capacity` pages, the null page included; pages in use move to others.

        Args:
            table: int32, every page in use, once for each owner; those that move are replaced there.

        Raises:
            ValueError: more are in use, or some have an owner elsewhere.
        """
        if capacity >= self.capacity:
            return
        above = table >= capacity
        moved, place, owners = table[above].long().unique(return_inverse=True, return_counts=True)
        free = self.free_list.ids().long()
        free = free[free < capacity]
        room = free[: moved.numel()]
        if room.numel() < moved.numel() or capacity < 1 or not torch.equal(owners, self.owners(moved)):
            raise ValueError(
                f"{self.capacity} pages cannot become {capacity}: more are in use, or some have an owner elsewhere."
            )
        for first in range(0, moved.numel(), PAGES_AT_ONCE):
            part = slice(first, first + PAGES_AT_ONCE)
            self.pages[room[part]] = self.pages[moved[part]]
        table[above] = room[place].to(table.dtype)
        if self.sharers is not None:
            self._grow_sharers()
            self.sharers[room] = self.sharers[moved]
            self.sharers = self.sharers[:capacity].clone()
        self.free_list.replace(free[moved.numel() :], capacity - (NULL_PAGE + 1))
        self.capacity = capacity
        self._reservation.shrink(capacity * self.page_bytes)

    def share(self, pages: Tensor) -> None:
        """Adds an owner to each of `pages` (int [n], no two alike)."""
        if self.sharers is None:
            self.sharers = torch.zeros(self.capacity, dtype=torch.int16, device=self.device)
        self._grow_sharers()
        self.sharers[pages.long()] += 1

    def release(self, pages: Tensor) -> None:
        """Takes an owner off each of `pages` (int [n], no two alike); those left without one become free."""
        if self.sharers is not None:
            self._grow_sharers()
            shared = self.sharers[pages.long()] > 0
            self.sharers[pages[shared].long()] -= 1
            pages = pages[~shared]
        self.free_list.give(pages)

    def owners(self, pages: Tensor) -> Tensor:
        """How many stores own each of `pages`, int64 [n]."""
        if self.sharers is None:
            return torch.ones(pages.numel(), dtype=torch.int64, device=self.device)
        self._grow_sharers()
        return self.sharers[pages.long()].long() + 1

    def _grow_sharers(self) -> None:
        if self.sharers.numel() < self.capacity:
            grown = torch.zeros(self.capacity, dtype=torch.int16, device=self.device)
            grown[: self.sharers.numel()] = self.sharers
            self.sharers = grown

    def _add_pages(self, count: int) -> None:
        # a budget is for pages, not for what may follow them
        self._reservation.commit((self.capacity + count) * self.page_bytes, ahead=self.max_pages is None)
        first = self.capacity
        self.capacity += count
        if first == NULL_PAGE:
            first, count = 1, count - 1
        self.free_list.extend(first, count)


class FreeList:
    """Ring of free page ids. Pages given back go behind the last one.

    Attributes:
        ring: int32 [at least capacity], page ids; the live part is [start, start + free) modulo capacity.
        state: int64 [3] on the device: start, where the next page is taken; free, counted so that full and empty
            differ; capacity.
        capacity: pages that were ever added.
    """

    def __init__(self, device: torch.device) -> None:
        self.ring = torch.empty(0, dtype=torch.int32, device=device)
        self.state = torch.zeros(3, dtype=torch.int64, device=device)
        self.capacity = 0

    def reserve(self, entries: int) -> None:
        """Makes the ring long enough for `entries` page ids, so that adding pages up to there leaves it in place."""
        if entries > self.ring.numel():
            grown = torch.empty(entries, dtype=torch.int32, device=self.ring.device)
            grown[: self.ring.numel()] = self.ring
            self.ring = grown

    @property
    def free(self) -> int:
        """Number of free pages. Reads the device."""
        return int(self.state[FREE])

    def ids(self) -> Tensor:
        """The free page ids in the order they would be taken, int32 [free]. Reads the device."""
        start, free, capacity = self.state.tolist()
        index = (start + torch.arange(free, device=self.ring.device)) % max(capacity, 1)
        return self.ring[index]

    def replace(self, ids: Tensor, capacity: int) -> None:
        """Makes `ids`, int [n], the free pages out of `capacity` in all, fewer than before."""
        self.capacity = capacity
        self.ring = torch.empty(capacity, dtype=torch.int32, device=self.ring.device)
        self.ring[: ids.numel()] = ids
        self.state[START], self.state[FREE], self.state[CAPACITY] = 0, ids.numel(), capacity

    def extend(self, first: int, count: int) -> None:
        """Adds the fresh pages [first, first + count). Reads nothing from the device."""
        before, self.capacity = self.capacity, self.capacity + count
        start, free = self.state[START].clone(), self.state[FREE].clone()
        order = torch.arange(self.capacity, device=self.ring.device)
        fresh = first + order - free
        ids = torch.where(order < free, self.ring[(start + order) % before], fresh) if before else fresh
        if self.capacity > self.ring.numel():
            self.ring = torch.empty(self.capacity, dtype=torch.int32, device=self.ring.device)
        # what stands behind the live part means nothing
        self.ring[: self.capacity] = ids
        self.state[START], self.state[FREE], self.state[CAPACITY] = 0, free + count, self.capacity

    def take(self, need: Tensor) -> tuple[Tensor, Tensor]:
        """Takes `need[i]` pages for each row i.

        Args:
            need: int64 [rows].

        Returns:
            Row of each page and its id, both int64 [sum(need)], in row order.

        Raises:
            MemoryError: fewer pages are free than asked for; nothing was taken.
        """
        total = int(need.sum())
        start, free, capacity = self.state.tolist()
        if total > free:
            raise MemoryError(f"{total} pages are needed but only {free} are free.")
        rows = torch.repeat_interleave(torch.arange(need.numel(), device=need.device), need, output_size=total)
        order = torch.arange(total, device=need.device)
        pages = self.ring[(start + order) % max(capacity, 1)].long()
        self.state[START] = (start + total) % max(capacity, 1)
        self.state[FREE] = free - total
        return rows, pages

    def take_at_most_one(self, need: Tensor) -> Tensor:
        """Takes one page for every True in `need`, without reading the device.

        The caller guarantees that enough pages are free.

        Args:
            need: bool [rows].

        Returns:
            int64 [rows]: a page id where needed, 0 (the null page) elsewhere.
        """
        rank = need.cumsum(0)
        if not self.ring.numel():
            # a pool without pages: none is needed
            return torch.zeros_like(rank)
        capacity = self.state[CAPACITY].clamp(min=1)
        pages = self.ring[(self.state[START] + rank - 1) % capacity].long()
        total = rank[-1]
        self.state[START] = (self.state[START] + total) % capacity
        self.state[FREE] -= total
        return torch.where(need, pages, 0)

    def give(self, pages: Tensor) -> None:
        """Returns pages (int [n], each owned by nobody any more) to the ring."""
        start, free, capacity = self.state.tolist()
        index = (start + free + torch.arange(pages.numel(), device=pages.device)) % max(capacity, 1)
        self.ring[index] = pages.to(torch.int32)
        self.state[FREE] = free + pages.numel()
