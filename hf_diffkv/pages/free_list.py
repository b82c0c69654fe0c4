"""The circular free page list and its coordination by prefix sums (DiffKV, section 5).

All page ids that nobody owns stand in one ring on the device. `start` is where the next page is taken, `free` counts
them explicitly, so full and empty differ; pages given back go behind the last one. Each row's demand becomes its own
disjoint range of the ring by a prefix sum over all rows: no locks and no loop over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

START, FREE, CAPACITY = 0, 1, 2


class FreeList:
    """Ring of free page ids.

    Attributes:
        ring: int32 [at least capacity], page ids; the live part is [start, start + free) modulo capacity.
        state: int64 [3] on the device: start, free, capacity.
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
