"""Stores that share memory until one of them changes.

Forks read the same pages, windows and tables. The first change of one gives it its own copy; every forward adds to the
significance of all its tokens, which stands in the pages, so a change copies them all. Pages count their owners, and
the last owner keeps them without a copy.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..memory import NULL_PAGE, PagePool, PageTable
from .state import ROW_STATE, Store

COPY_PAGES = 4096


def fork_store(store: Store) -> Store:
    """A store that continues from the same tokens, sharing memory with `store`."""
    store.settle()
    if any(recorded is not None for recorded in store.recorded):
        raise ValueError("some tokens may still be taken back; call cache.crop(0) before forking.")
    twin = object.__new__(Store)
    twin.__dict__.update(store.__dict__)
    if store.family is None:
        store.family = weakref.WeakSet([store])
        _release_at_end(store)
    store.pool.share(store.owned_pages())
    twin.family = store.family
    twin.family.add(twin)
    _release_at_end(twin)
    if store.twins is None:
        store.twins = weakref.WeakSet([store])
    twin.twins = store.twins
    twin.twins.add(twin)
    return twin


def begin_forward(store: Store, tokens: int) -> None:
    """Prepares a forward of `tokens` new tokens; raises as `Store.begin` does."""
    make_private(store)
    store.begin(tokens)


def make_private(store: Store) -> None:
    """Gives `store` its own copy of everything it shares, before it changes.

    Raises:
        MemoryError: the copy does not fit; nothing has changed then.
    """
    if store.twins is None:
        return
    pages = store.owned_pages()
    shared = pages[store.pool.owners(pages) > 1].long()
    store.pool.ensure_free(shared.numel())
    _, fresh = store.pool.free_list.take(torch.tensor([shared.numel()], device=store.device))
    copy_pages(store, shared, fresh)
    renamed = torch.arange(store.pool.capacity, device=store.device)
    renamed[shared] = fresh
    store.pool.release(shared)
    table = store.table.table
    store.table = store.table.copy()
    store.table.table = renamed[table.long()].to(table.dtype)
    store.holder[0] = store.table
    store.twins.discard(store)
    if len(store.twins) > 0:
        for name in ROW_STATE:
            setattr(store, name, getattr(store, name).clone())
        store.flag, store.invalid = store.flag.clone(), store.invalid.clone()
        store.padding = store.padding.copy()
        store.recorded = list(store.recorded)
        store.scratch = None
    store.twins = None
    store.forget_bounds()


def copy_pages(store: Store, source: Tensor, target: Tensor) -> None:
    """Copies whole pages, int64 [n] ids each."""
    pages = store.pool.pages
    for start in range(0, source.numel(), COPY_PAGES):
        part = slice(start, start + COPY_PAGES)
        pages[target[part]] = pages[source[part]]


def _release_at_end(store: Store) -> None:
    # pages of a fork that is dropped go back to the pool it shared; what holds them is looked up at that time
    store.holder = [store.table]
    weakref.finalize(store, _release, store.pool, store.holder).atexit = False


def _release(pool: PagePool, holder: list[PageTable]) -> None:
    table = holder[0].table
    pool.release(table[table != NULL_PAGE])
