"""Selection, repetition and removal of requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pages import NULL_PAGE
from ..pages.rows import ROW_STATE
from .budget import check_budget, make_room
from .compaction import settle
from .forks import make_private
from .lowering import make_room_for_copies
from .state import Changing, Store

COPY_PAGES = 4096


def copy_pages(store: Store, source: Tensor, target: Tensor) -> None:
    """Copies whole pages within a pool; `source` and `target` are page ids, int64 [n]."""
    pages = store.pool.pages
    for start in range(0, source.numel(), COPY_PAGES):
        part = slice(start, start + COPY_PAGES)
        pages[target[part]] = pages[source[part]]


def move_rows(store: Store, index: Tensor) -> None:
    """Reorders the batch after `prepare_rows` with the same `index`: request i becomes the former request index[i].

    A request that appears more than once is copied. The pages of a request that does not appear are freed at once.

    Args:
        index: old request of each new one, int64 [new batch size], each in [0, batch_size).
    """
    index = index.to(store.device)
    given, chosen, duplicate = _moves(store, index)
    with Changing(store):
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
        make_room_for_copies(store, index)
    check_budget(store, more)
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
    with Changing(store):
        for name in (*ROW_STATE, "layer_index"):
            setattr(store, name, getattr(store, name)[:used].clone())
        store.table.table = store.table.table[:used].clone()
        store.lowering.drop_layers(used)
        store.recorded = store.recorded[:used]
        store.num_layers = used
        store.layers = store.layers[:used]
        store.forget_bounds()
