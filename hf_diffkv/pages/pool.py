"""Page pool of one device: the pages' memory, its growth, and the free list.

Free pages are assigned by prefix sums (DiffKV, section 5): the free ids are kept in a ring on the device, and a prefix
sum over all rows turns each row's demand into a disjoint range of the ring, without locks and without a loop over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reserve import reserve

NULL_PAGE = 0
# entries of `FreeList.state`
START, FREE, CAPACITY = 0, 1, 2
# pages copied at a time when some have to move
PAGES_AT_ONCE = 256


class PagePool:
    """Unified pages of `page_bytes` each. Page 0 is the null page and is never handed out.

    Args:
        page_bytes: size of a page.
        device: device that holds the pages.
        max_pages: maximum number of pages, including the null page; None is unlimited.
    """

    def __init__(self, page_bytes: int, device: torch.device, max_pages: int | None = None) -> None:
        self.page_bytes = page_bytes
        self.device = device
        self.max_pages = max_pages
        self.free_list = FreeList(device)
        self.capacity = 0
        # number of owners beyond the first, by page; None until a page is shared
        self.sharers: Tensor | None = None
        self._reservation = reserve(device)
        self._add_pages(1)

    @property
    def grows_in_place(self) -> bool:
        """Whether pages keep their addresses when the pool grows."""
        return self._reservation.grows_in_place

    @property
    def granularity(self) -> int:
        """Unit in which the pages' memory is taken, in bytes; 0 if that does not matter."""
        return self._reservation.granularity

    @property
    def slack(self) -> int:
        """Bytes held beyond the existing pages."""
        return self._reservation.slack

    def copy_of(self, pages: Tensor) -> tuple[PagePool, Tensor]:
        """Copies pages, int64 [n], to a new pool; returns it and their ids there, int64 [n]."""
        pool = PagePool(self.page_bytes, self.device, self.max_pages)
        pool.ensure_free(pages.numel())
        _, fresh = pool.free_list.take(torch.tensor([pages.numel()], device=self.device))
        pool.pages[fresh] = self.pages[pages]
        return pool, fresh

    @property
    def pages(self) -> Tensor:
        """Memory of the pages, uint8 [at least capacity, page_bytes]; only the first `capacity` may be used."""
        flat = self._reservation.tensor
        count = flat.numel() // self.page_bytes
        return flat[: count * self.page_bytes].view(count, self.page_bytes)

    @property
    def address(self) -> int:
        """Address of the first page."""
        return self._reservation.tensor.data_ptr()

    @property
    def bytes(self) -> int:
        """Bytes held: all existing pages, memory mapped in advance, the free list and the counts of owners."""
        ring = self.free_list.ring
        sharers = 0 if self.sharers is None else 2 * self.sharers.numel()
        pages = self.capacity * self.page_bytes + self._reservation.slack
        return pages + 4 * ring.numel() + 8 * self.free_list.state.numel() + sharers

    def ensure_free(self, count: int, free: int | None = None) -> None:
        """Grows the pool until `count` pages are free.

        Args:
            count: number of free pages needed.
            free: number of free pages; None reads the device.

        Raises:
            MemoryError: `max_pages` would be exceeded, or the device is out of memory; nothing has changed.
        """
        missing = count - (self.free_list.free if free is None else free)
        if missing <= 0:
            return
        allowed = missing if self.max_pages is None else self.max_pages - self.capacity
        if missing > allowed:
            raise MemoryError(
                f"the cache needs {missing} more pages of {self.page_bytes} bytes but its limit of {self.max_pages} "
                "pages is reached; raise max_bytes, lower the demand (larger alpha_low), or use a smaller batch."
            )
        self._add_pages(missing)

    def truncate(self, capacity: int, table: Tensor) -> None:
        """Shrinks the pool to `capacity` pages, including the null page, moving the pages in use below that.

        Args:
            capacity: number of pages to keep.
            table: page tables of all owners, int32; contains every page in use once per owner. Ids of moved pages are
                replaced in place.

        Raises:
            ValueError: more pages are in use, or a page to be moved has an owner outside `table`.
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
        """Adds an owner to each of `pages`, int [n] without duplicates."""
        if self.sharers is None:
            self.sharers = torch.zeros(self.capacity, dtype=torch.int16, device=self.device)
        self._grow_sharers()
        self._count_owners(pages, 1)

    def release(self, pages: Tensor) -> None:
        """Removes an owner from each of `pages`, int [n] without duplicates; frees pages left without one."""
        if self.sharers is not None:
            self._grow_sharers()
            self._count_owners(pages, -1)
            pages = pages[self.sharers[pages.long()] < 0]
            self.sharers[pages.long()] = 0
        self.free_list.give(pages)

    def owners(self, pages: Tensor) -> Tensor:
        """Returns the number of stores that own each of `pages`, int64 [n]."""
        if self.sharers is None:
            return torch.ones(pages.numel(), dtype=torch.int64, device=self.device)
        self._grow_sharers()
        return self.sharers[pages.long()].long() + 1

    def _count_owners(self, pages: Tensor, more: int) -> None:
        # in one operation, because garbage collection may release another owner's pages between any two
        self.sharers.index_add_(0, pages.long(), self.sharers.new_ones(pages.numel()), alpha=more)

    def _grow_sharers(self) -> None:
        if self.sharers.numel() < self.capacity:
            grown = torch.zeros(self.capacity, dtype=torch.int16, device=self.device)
            grown[: self.sharers.numel()] = self.sharers
            self.sharers = grown

    def _add_pages(self, count: int) -> None:
        # with a budget, no memory is taken in advance
        self._reservation.commit((self.capacity + count) * self.page_bytes, ahead=self.max_pages is None)
        first, capacity = self.capacity, self.capacity + count
        if first == NULL_PAGE:
            first, count = 1, count - 1
        self.free_list.extend(first, count)
        self.capacity = capacity


class FreeList:
    """Ring of free page ids. Freed pages are appended at its end.

    Attributes:
        ring: page ids, int32 [at least capacity]; the free ones are at [start, start + free) modulo capacity.
        state: start (index of the next page to take), number of free pages, and capacity, int64 [3] on the device.
        capacity: number of pages managed.
    """

    def __init__(self, device: torch.device) -> None:
        self.ring = torch.empty(0, dtype=torch.int32, device=device)
        self.state = torch.zeros(3, dtype=torch.int64, device=device)
        self.capacity = 0

    def reserve(self, entries: int) -> None:
        """Lengthens the ring to `entries` page ids, so that it is not reallocated until the pool exceeds that."""
        if entries > self.ring.numel():
            grown = torch.empty(entries, dtype=torch.int32, device=self.ring.device)
            grown[: self.ring.numel()] = self.ring
            self.ring = grown

    @property
    def free(self) -> int:
        """Number of free pages. Reads the device."""
        return int(self.state[FREE])

    def ids(self) -> Tensor:
        """Returns the free page ids in the order they will be taken, int32 [free]. Reads the device."""
        start, free, capacity = self.state.tolist()
        index = (start + torch.arange(free, device=self.ring.device)) % max(capacity, 1)
        return self.ring[index]

    def replace(self, ids: Tensor, capacity: int) -> None:
        """Replaces the free pages with `ids`, int [n], out of `capacity` pages, fewer than before.

        A ring lengthened by `reserve` stays in place.
        """
        if self.ring.numel() <= self.capacity:
            self.ring = torch.empty(capacity, dtype=torch.int32, device=self.ring.device)
        self.capacity = capacity
        self.ring[: ids.numel()] = ids
        self.state[START], self.state[FREE], self.state[CAPACITY] = 0, ids.numel(), capacity

    def extend(self, first: int, count: int) -> None:
        """Adds the new pages [first, first + count) without reading the device."""
        before, capacity = self.capacity, self.capacity + count
        start, free = self.state[START].clone(), self.state[FREE].clone()
        order = torch.arange(capacity, device=self.ring.device)
        fresh = first + order - free
        ids = torch.where(order < free, self.ring[(start + order) % before], fresh) if before else fresh
        # everything that may run out of memory comes before the first change
        ring = ids.to(torch.int32) if capacity > self.ring.numel() else self.ring
        after = torch.stack([torch.zeros_like(free), free + count, torch.full_like(free, capacity)])
        # entries beyond the free pages are meaningless
        ring[:capacity] = ids
        self.ring, self.capacity = ring, capacity
        self.state.copy_(after)

    def take(self, need: Tensor) -> tuple[Tensor, Tensor]:
        """Takes `need[i]` pages for each row i.

        Args:
            need: number of pages of each row, int64 [rows].

        Returns:
            Row and id of each page, int64 [sum(need)] each, in row order.

        Raises:
            MemoryError: too few pages are free; nothing was taken.
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
        """Takes one page for every True in `need` without reading the device.

        The caller guarantees that enough pages are free.

        Args:
            need: True for rows that need a page, bool [rows].

        Returns:
            Page id of each row, int64 [rows]; 0 (the null page) if it needs none.
        """
        rank = need.cumsum(0)
        if not self.ring.numel():
            # the pool has no pages, so none is needed
            return torch.zeros_like(rank)
        capacity = self.state[CAPACITY].clamp(min=1)
        pages = self.ring[(self.state[START] + rank - 1) % capacity].long()
        total = rank[-1]
        self.state[START] = (self.state[START] + total) % capacity
        self.state[FREE] -= total
        return torch.where(need, pages, 0)

    def give(self, pages: Tensor) -> None:
        """Frees pages, int [n], which must no longer have an owner."""
        start, free, capacity = self.state.tolist()
        index = (start + free + torch.arange(pages.numel(), device=pages.device)) % max(capacity, 1)
        self.ring[index] = pages.to(torch.int32)
        self.state[FREE] = free + pages.numel()
