"""Stores that share memory until one of them changes.

Forks read the same pages, windows and tables. Before a fork first changes, it gets its own copy in its own pool. Every
forward adds to the significance of all tokens, which is stored in the pages, so a change would copy all pages anyway.
Pages are reference-counted. The last owner keeps the pool and its pages without a copy.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

from ..pages import NULL_PAGE, PagePool, PageTable
from ..pages.rows import ROW_STATE
from .compaction import settle
from .state import Changing, Store


def fork_store(store: Store) -> Store:
    """Returns a store that continues from the same tokens and shares memory with `store`.

    Raises:
        ValueError: some recorded tokens may still be cropped.
    """
    settle(store)
    if store.revocable:
        raise ValueError("some tokens may still be rolled back; call cache.crop(0) before forking.")
    try:
        if store.twins is None:
            store.twins = weakref.WeakSet([store])
            _release_at_end(store)
        store.pool.share(store.owned_pages())
        twin = object.__new__(Store)
        twin.__dict__.update(store.__dict__, lowering=replace(store.lowering, together=()))
        twin.twins.add(twin)
        _release_at_end(twin)
    except BaseException:
        # pages never given back would be lost to all of them; other threads may fork them in the meantime
        for each in list(store.twins or [store]):
            each.unfinished += 1
        raise
    return twin


def make_private(store: Store) -> None:
    """Gives `store` its own copy of everything it shares, before it changes.

    Raises:
        MemoryError: the copy does not fit; nothing has changed.
    """
    if store.twins is None:
        return
    if len(store.twins) > 1:
        # all copies before the first change, as each may fail
        pool, table = store.private_pages()
        own = {name: getattr(store, name).clone() for name in (*ROW_STATE, "flag", "invalid", "changed_past")}
        own |= {"pool": pool, "table": table, "padding": store.padding.copy(), "recorded": list(store.recorded)}
        moments = None if store.lowering.moments is None else store.lowering.moments.clone()
        with Changing(store):
            store.finalizer()
            vars(store).update(own, scratch=None)
            store.lowering.moments = moments
    store.twins.discard(store)
    store.twins = None
    store.finalizer.detach()
    store.finalizer = None
    store.forget_bounds()


def _release_at_end(store: Store) -> None:
    # a fork that is dropped unchanged releases its pages
    store.finalizer = weakref.finalize(store, _release, store.pool, store.table)
    store.finalizer.atexit = False


def _release(pool: PagePool, table: PageTable) -> None:
    pool.release(table.table[table.table != NULL_PAGE])
