"""Memory of continuous batching at a moment. The device is read only if the figures are wanted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hf_diffkv.pages.pool import FREE

from .slots import Slots


@dataclass(frozen=True)
class ServingMemory:
    """Memory of continuous batching at this moment.

    Attributes:
        requests: number of requests in flight, including prompts under way.
        slots: number of slots, which grows and shrinks with demand.
        longest: tokens of the longest request that is admitted.
        held_bytes: bytes of windows, tables, scratch memory, and the pages of requests.
        peak_bytes: peak bytes on the device after any forward, including free pages, which stay for later requests.
        max_bytes: budget in bytes.
        free_share: free share, 0 to 1, of the pages that the budget allows besides the slots.
        until_full: name of the precision of all tokens until the budget is full, such as "K8V8/K6V5" if layers differ;
            None if no heads are lowered then.
        precise_share: share, 0 to 1, of the stored tokens of all heads that have this precision.
        lowered: number of tokens over layers and heads that were lowered after they were stored.
        room: minimum number of tokens that each request in flight can still get once all heads are lowered.
    """

    requests: int
    slots: int
    longest: int
    held_bytes: int
    peak_bytes: int
    max_bytes: int
    free_share: float
    until_full: str | None = None
    precise_share: float | None = None
    lowered: int = 0
    room: int | None = None


class Moment:
    """Memory at the time this object is made. Making it copies the pools' counts but does not wait for the device.

    Args:
        slots: slots of the requests.
        requests: number of requests that hold memory.
        held: bytes that the device holds for all requests, including free pages.
        peak: peak bytes so far.

    Attributes:
        thread: identifier of the thread that made it.
    """

    def __init__(self, slots: Slots, requests: int, held: int, peak: int) -> None:
        self.thread = threading.get_ident()
        pools = [part.store.pool for part in slots.parts]
        self._counts = torch.stack([pool.free_list.state for pool in pools])
        # another thread may read on another stream
        self._copied = torch.cuda.Event() if self._counts.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._pages = [(pool.capacity, pool.page_bytes) for pool in pools]
        self._bytes, self._most_pages = held, int(slots.max_pages.sum())
        self._requests = (requests, slots.count, slots.longest)
        self._limits = (peak, slots.max_bytes)
        self._rungs = slots.rung_counts()

    @cached_property
    def memory(self) -> ServingMemory:
        """Figures of that moment. The first read waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        free = self._counts[:, FREE].tolist()
        used = sum(capacity - 1 - pages for (capacity, _), pages in zip(self._pages, free))
        held = self._bytes - sum(pages * page_bytes for (_, page_bytes), pages in zip(self._pages, free))
        found = ServingMemory(*self._requests, held, *self._limits, 1 - used / max(1, self._most_pages))
        rungs = self._rungs
        if rungs is None:
            return found
        shares = {"until_full": rungs.precise, "precise_share": rungs.precise_share}
        return replace(found, **shares, lowered=rungs.lowered, room=rungs.room)
