"""Choosing, repeating and dropping requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pages import NULL_PAGE
from ..pages.rows import ROW_STATE
from .budget import make_room
from .compaction import settle
from .fork import copy_pages, make_private
from .state import Store


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
