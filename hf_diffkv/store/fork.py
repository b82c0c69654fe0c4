"""Stores that share memory until one of them changes.

Forks read the same pages, windows and tables. The first change of one gives it its own copy, in a pool of its own:
every forward adds to the significance of all tokens, which stands in the pages, so a change would copy them all
anyway. Pages count their owners, and the last owner keeps pool and pages without a copy.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from ..pages import NULL_PAGE, PagePool, PageTable
from ..pages.rows import ROW_STATE
from .compaction import settle
from .state import Store

COPY_PAGES = 4096


def fork_store(store: Store) -> Store:
    """A store that continues from the same tokens, sharing memory with `store`.

    Raises:
        ValueError: some tokens may still be taken back.
    """
    settle(store)
    if any(recorded is not None for recorded in store.recorded):
        raise ValueError("some tokens may still be taken back; call cache.crop(0) before forking.")
    if store.twins is None:
        store.twins = weakref.WeakSet([store])
        _release_at_end(store)
    store.pool.share(store.owned_pages())
    twin = object.__new__(Store)
    twin.__dict__.update(store.__dict__, native_calls=None)
    twin.twins.add(twin)
    _release_at_end(twin)
    return twin


def make_private(store: Store) -> None:
    """Gives `store` its own copy of everything it shares, before it changes.

    Raises:
        MemoryError: the copy does not fit; nothing has changed then.
    """
    if store.twins is None:
        return
    if len(store.twins) > 1:
        pool, table = store.private_pages()
        store.pool.release(store.owned_pages())
        store.pool, store.table = pool, table
        for name in ROW_STATE:
            setattr(store, name, getattr(store, name).clone())
        for name in ("flag", "invalid", "changed_past"):
            setattr(store, name, getattr(store, name).clone())
        store.padding = store.padding.copy()
        store.recorded = list(store.recorded)
        store.scratch = None
    store.twins.discard(store)
    store.twins = None
    store.finalizer.detach()
    store.finalizer = None
    store.forget_bounds()


def copy_pages(store: Store, source: Tensor, target: Tensor) -> None:
    """Copies whole pages within a pool, int64 [n] ids each."""
    pages = store.pool.pages
    for start in range(0, source.numel(), COPY_PAGES):
        part = slice(start, start + COPY_PAGES)
        pages[target[part]] = pages[source[part]]


def _release_at_end(store: Store) -> None:
    # a fork that is dropped unchanged takes its name off the pages
    store.finalizer = weakref.finalize(store, _release, store.pool, store.table)
    store.finalizer.atexit = False


def _release(pool: PagePool, table: PageTable) -> None:
    pool.release(table.table[table.table != NULL_PAGE])
