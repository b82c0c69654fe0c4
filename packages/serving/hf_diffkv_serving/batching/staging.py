"""One slot of a store as a separate store, for a forward with several tokens of one request.

It shares all memory with the slot, so nothing has to be copied after a prompt: the next generated token is a step of
the store with all slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_diffkv.pages import PageTable
from hf_diffkv.pages.rows import ROW_STATE
from hf_diffkv.store.state import Padding, Store

from .reservations import ReservedPool


class SlotTable(PageTable):
    """Table rows of one slot. The table cannot grow through them."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def ensure_width(self, tokens: int, capacity: int, high_pages: Tensor) -> None:
        """Raises `MemoryError` if `tokens` tokens do not fit; arguments as in `PageTable`."""
        if -(-tokens // capacity) + 2 > self.width:
            raise MemoryError(
                f"a request of {tokens} tokens is longer than its table allows; raise the longest length of requests."
            )


def stage(store: Store, slot: int, seen: int, pool: ReservedPool) -> Store:
    """Returns a store of the one request in `slot`, valid until the tensors of `store` move.

    Args:
        seen: number of tokens of the request so far.
        pool: pool from which the returned store takes pages.
    """
    one = slice(slot, slot + 1)
    staging = object.__new__(Store)
    staging.__dict__.update(store.__dict__)
    state = {name: getattr(store, name)[:, one] for name in ROW_STATE}
    fresh = {"table": SlotTable(store.table.table[:, one]), "pool": pool, "padding": Padding(1, store.device)}
    own = {"batch_size": 1, "seen": seen, "scratch": None, "compaction_due": False}
    flags = {name: torch.zeros_like(getattr(store, name)) for name in ("flag", "invalid", "changed_past")}
    staging.__dict__.update({**state, **fresh, **own, **flags})
    staging.padding.length = seen
    return staging
