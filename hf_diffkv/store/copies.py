"""Requests that are chosen, repeated and dropped, and stores that share memory until one of them changes.

Forks read the same pages, windows and tables. The first change of one gives it its own copy, in a pool of its own:
every forward adds to the significance of all tokens, which stands in the pages, so a change would copy them all
anyway. Pages count their owners, and the last owner keeps pool and pages without a copy.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..pages import NULL_PAGE, PagePool, PageTable
from ..pages.rows import ROW_STATE
from .budget import make_room
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
        for name in (*ROW_STATE, "flag", "invalid", "changed_past"):
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


def select_rows(store: Store, index: Tensor) -> None:
    """Makes the batch `index` of the old one: request i becomes what request index[i] was.

    A request that appears again is copied; one that does not appear gives its pages back at once.

    Args:
        index: int64 [new batch size], each in [0, batch_size).

    Raises:
        MemoryError: the copies do not fit; nothing has changed then.
    """
    prepare_rows(store, index)
    move_rows(store, index)


def move_rows(store: Store, index: Tensor) -> None:
    """`select_rows` after `prepare_rows` with the same `index`."""
    index = index.to(store.device)
    given, chosen, duplicate = _moves(store, index)
    store.pool.free_list.give(given)
    source = chosen[duplicate].long()
    _, fresh = store.pool.free_list.take(torch.tensor([source.numel()], device=store.device))
    copy_pages(store, source, fresh)
    chosen[duplicate] = fresh.to(chosen.dtype)
    store.table.table = chosen
    for name in ROW_STATE:
        setattr(store, name, getattr(store, name)[:, index].clone())
    store.recorded = [None if recorded is None else recorded.select(index) for recorded in store.recorded]
    store.padding.select(index)
    store.batch_size = index.numel()
    store.forget_bounds()


def prepare_rows(store: Store, index: Tensor) -> None:
    """Makes the room that `move_rows` needs for the same `index`.

    Raises:
        MemoryError: the copies do not fit; nothing has changed then.
    """
    make_private(store)
    settle(store)
    rows_more = max(0, index.numel() - store.batch_size)
    store.check_budget((store.bytes - store.pool.bytes) * rows_more // store.batch_size)
    given, _, duplicate = _moves(store, index.to(store.device))
    missing = max(0, int(duplicate.sum()) - given.numel())
    try:
        store.pool.ensure_free(missing)
    except MemoryError:
        if store.config.max_bytes is None:
            raise
        make_room(store, missing)
        prepare_rows(store, index)


def _moves(store: Store, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of dropped requests; the table of the new batch; where in it stand pages that need a copy."""
    table = store.table.table
    first = torch.full((store.batch_size,), index.numel(), device=store.device)
    order = torch.arange(index.numel(), device=store.device)
    first.scatter_reduce_(0, index, order, "amin")
    given = table[:, first == index.numel()]
    chosen = table[:, index].clone()
    duplicate = (chosen != NULL_PAGE) & (first[index] != order)[:, None, None]
    return given[given != NULL_PAGE], chosen, duplicate


def drop_unused_layers(store: Store, used: int) -> None:
    """Gives back what is held for layers beyond the first `used`, which never came."""
    if used == store.num_layers:
        return
    make_private(store)
    for name in (*ROW_STATE, "layer_index"):
        setattr(store, name, getattr(store, name)[:used].clone())
    store.table.table = store.table.table[:used].clone()
    store.recorded = store.recorded[:used]
    store.num_layers = used
    store.layers = store.layers[:used]
    store.forget_bounds()
