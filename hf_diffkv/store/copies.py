"""Selection, repetition and removal of requests, and stores that share memory until one of them changes.

Forks read the same pages, windows and tables. Before a fork first changes, it gets its own copy in its own pool. Every
forward adds to the significance of all tokens, which is stored in the pages, so a change would copy all pages anyway.
Pages are reference-counted. The last owner keeps the pool and its pages without a copy.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from ..pages import NULL_PAGE, PagePool, PageTable
from ..pages.rows import ROW_STATE
from .budget import make_room
from .compaction import settle
from .lowering import make_room_for_copies
from .state import Store

COPY_PAGES = 4096


def fork_store(store: Store) -> Store:
    """Returns a store that continues from the same tokens and shares memory with `store`.

    Raises:
        ValueError: some recorded tokens may still be cropped.
    """
    settle(store)
    if any(recorded is not None for recorded in store.recorded):
        raise ValueError("some tokens may still be taken back; call cache.crop(0) before forking.")
    if store.twins is None:
        store.twins = weakref.WeakSet([store])
        _release_at_end(store)
    store.pool.share(store.owned_pages())
    twin = object.__new__(Store)
    twin.__dict__.update(store.__dict__, lowering=replace(store.lowering))
    twin.twins.add(twin)
    _release_at_end(twin)
    return twin


def make_private(store: Store) -> None:
    """Gives `store` its own copy of everything it shares, before it changes.

    Raises:
        MemoryError: the copy does not fit; nothing has changed.
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
        store.lowering.moments = None if store.lowering.moments is None else store.lowering.moments.clone()
        store.recorded = list(store.recorded)
        store.scratch = None
    store.twins.discard(store)
    store.twins = None
    store.finalizer.detach()
    store.finalizer = None
    store.forget_bounds()


def copy_pages(store: Store, source: Tensor, target: Tensor) -> None:
    """Copies whole pages within a pool; `source` and `target` are page ids, int64 [n]."""
    pages = store.pool.pages
    for start in range(0, source.numel(), COPY_PAGES):
        part = slice(start, start + COPY_PAGES)
        pages[target[part]] = pages[source[part]]


def _release_at_end(store: Store) -> None:
    # a fork that is dropped unchanged releases its pages
    store.finalizer = weakref.finalize(store, _release, store.pool, store.table)
    store.finalizer.atexit = False


def _release(pool: PagePool, table: PageTable) -> None:
    pool.release(table.table[table.table != NULL_PAGE])


def select_rows(store: Store, index: Tensor) -> None:
    """Reorders the batch: request i becomes the former request index[i].

    A request that appears more than once is copied. The pages of a request that does not appear are freed at once.

    Args:
        index: old request of each new one, int64 [new batch size], each in [0, batch_size).

    Raises:
        MemoryError: the copies do not fit; nothing has changed.
    """
    prepare_rows(store, index)
    move_rows(store, index)


def move_rows(store: Store, index: Tensor) -> None:
    """Reorders the batch as `select_rows` does, after `prepare_rows` with the same `index`."""
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
    """Reserves the pages that `move_rows` needs for the same `index`.

    Raises:
        MemoryError: the copies do not fit; nothing has changed.
    """
    make_private(store)
    settle(store)
    rows_more = max(0, index.numel() - store.batch_size)
    more = (store.bytes - store.pool.bytes) * rows_more // store.batch_size
    if store.lowering.active:
        make_room_for_copies(store, index, more)
    store.check_budget(more)
    given, _, duplicate = _moves(store, index.to(store.device))
    missing = max(0, int(duplicate.sum()) - given.numel())
    try:
        store.pool.ensure_free(missing)
    except MemoryError:
        if store.config.max_bytes is None or store.lowering.active:
            raise
        make_room(store, missing)
        prepare_rows(store, index)


def _moves(store: Store, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the pages of dropped requests, the new batch's table, and a mask of its entries that need a copy."""
    table = store.table.table
    first = torch.full((store.batch_size,), index.numel(), device=store.device)
    order = torch.arange(index.numel(), device=store.device)
    first.scatter_reduce_(0, index, order, "amin")
    given = table[:, first == index.numel()]
    chosen = table[:, index].clone()
    duplicate = (chosen != NULL_PAGE) & (first[index] != order)[:, None, None]
    return given[given != NULL_PAGE], chosen, duplicate


def drop_unused_layers(store: Store, used: int) -> None:
    """Frees the state of the layers beyond the first `used`, which the model never ran."""
    if used == store.num_layers:
        return
    make_private(store)
    for name in (*ROW_STATE, "layer_index"):
        setattr(store, name, getattr(store, name)[:used].clone())
    store.table.table = store.table.table[:used].clone()
    store.lowering.moments = None if store.lowering.moments is None else store.lowering.moments[:used].clone()
    store.recorded = store.recorded[:used]
    store.num_layers = used
    store.layers = store.layers[:used]
    store.forget_bounds()
