"""Pages that requests of one store share, copy-on-write, if no tokens are chosen by significance.

Tokens of a row are then stored in order and stay as they are, so a full page never changes. Requests that begin alike
share such pages. Each has its own copy of a partial page, to which it continues to write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_diffkv.pages import NULL_PAGE
from hf_diffkv.pages.pool import PAGES_AT_ONCE
from hf_diffkv.pages.rows import HIGH, LOW, column
from hf_diffkv.store.copies import copy_pages
from hf_diffkv.store.state import Store

from .slot_store import SlotStore


@dataclass(frozen=True, eq=False)
class Entries:
    """New content of a slot's page table.

    Attributes:
        source: int32 [layers, heads, width], pages of the pool that the request comes from.
        shared: int32 [layers, heads, width], pages of the slots' pool with the same content, which never change; the
            null page if there is none.
    """

    source: Tensor
    shared: Tensor

    @property
    def to_copy(self) -> Tensor:
        """Entries that need a page of their own, bool [layers, heads, width]."""
        return (self.source != NULL_PAGE) & (self.shared == NULL_PAGE)

    @property
    def pages(self) -> int:
        """Number of entries that need a page of their own."""
        return int(self.to_copy.sum())

    @property
    def shared_pages(self) -> int:
        """Number of pages that get another owner."""
        return int((self.shared != NULL_PAGE).sum())


def entries_of_slot(store: SlotStore, slot: int, share: bool) -> Entries:
    """Returns the entries for a twin of the request in `slot`. All pages are copied unless `share`."""
    table = store.table.table[:, slot]
    shared = torch.where(_partial(store, slot, table), NULL_PAGE, table) if share else torch.zeros_like(table)
    return Entries(table, shared)


def entries_of_request(store: SlotStore, source: Store, alike: int | None) -> Entries:
    """Returns the entries for the one request of `source`, a store of the same layers.

    Args:
        alike: slot whose request begins alike. Pages that are full in both and hold the same bytes are shared
            with it; None copies all pages.
    """
    table, width = source.table.table[:, 0], store.table.width
    # high pages are on the left, low ones on the right
    both = min(width, table.shape[-1])
    high = -(-source.high_count[:, 0, :, None] // store.layout.high.capacity)
    is_high = torch.arange(table.shape[-1], device=store.device) < high
    entries = table.new_zeros(*table.shape[:-1], width)
    entries[..., :both] = torch.where(is_high, table, NULL_PAGE)[..., :both]
    entries[..., -both:] += torch.where(is_high, NULL_PAGE, table)[..., -both:]
    shared = torch.zeros_like(entries)
    if alike is not None:
        mine = store.table.table[:, alike]
        partial = _partial(store, alike, mine) | _partial(source, 0, entries)
        place = (entries != NULL_PAGE) & (mine != NULL_PAGE) & ~partial
        theirs, pages = entries[place].long(), mine[place].long()
        alike = [
            (source.pool.pages[theirs[part]] == store.pool.pages[pages[part]]).all(-1)
            for part in (slice(at, at + PAGES_AT_ONCE) for at in range(0, pages.numel(), PAGES_AT_ONCE))
        ]
        if alike:
            shared[place] = torch.where(torch.cat(alike), mine[place], NULL_PAGE)
    return Entries(entries, shared)


def fill_entries(store: SlotStore, slot: int, entries: Entries, source: Store) -> None:
    """Gives `slot` its pages, copied from `source` or shared. There must be enough free pages for the copies."""
    to_copy = entries.to_copy
    pages = entries.source[to_copy].long()
    _, fresh = store.pool.free_list.take(torch.tensor([pages.numel()], device=store.device))
    try:
        if source.pool is store.pool:
            copy_pages(store, pages, fresh)
        else:
            store.pool.pages[fresh] = source.pool.pages[pages]
        table = entries.shared.clone()
        table[to_copy] = fresh.to(table.dtype)
        shared = entries.shared[entries.shared != NULL_PAGE]
        if shared.numel():
            store.pool.share(shared)
    except BaseException:
        # the device may run out of memory while copying
        store.pool.free_list.give(fresh)
        raise
    store.table.table[:, slot] = table


def _partial(store: Store, request: int, table: Tensor) -> Tensor:
    """Returns bool [layers, heads, width], which entries of a request's `table`, int32 of that shape, are not full."""
    width = table.shape[-1]
    entry = torch.arange(width, device=table.device)
    found = torch.zeros_like(table, dtype=torch.bool)
    for tier, counts, size in (
        (HIGH, store.high_count, store.layout.high.capacity),
        (LOW, store.low_count, store.layout.low.capacity),
    ):
        count = counts[:, request, :, None]
        found |= (count % size > 0) & (entry == column(tier, count // size, width))
    return found
