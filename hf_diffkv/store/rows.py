"""Choosing, repeating and dropping requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..memory import NULL_PAGE
from .budget import make_room
from .fork import copy_pages, make_private
from .state import ROW_STATE, Store


def select_rows(store: Store, index: Tensor) -> None:
    """Makes the batch `index` of the old one: request i becomes what request index[i] was.

    A request that appears again is copied; one that does not appear gives its pages back at once.

    Args:
        index: int64 [new batch size], each in [0, batch_size).

    Raises:
        MemoryError: the copies do not fit; nothing has changed then.
    """
    make_private(store)
    store.settle()
    index = index.to(store.device)
    table = store.table.table
    first = torch.full((store.batch_size,), index.numel(), device=store.device)
    order = torch.arange(index.numel(), device=store.device)
    first.scatter_reduce_(0, index, order, "amin")
    copied = first[index] != order
    dropped = first == index.numel()
    given = table[:, dropped]
    given = given[given != NULL_PAGE]
    chosen = table[:, index].clone()
    duplicate = (chosen != NULL_PAGE) & copied[:, None, None]
    source = chosen[duplicate].long()
    rows_more = max(0, index.numel() - store.batch_size)
    store.check_budget((store.bytes - store.pool.bytes) * rows_more // store.batch_size)
    missing = max(0, source.numel() - given.numel())
    try:
        store.pool.ensure_free(missing)
    except MemoryError:
        if store.config.max_bytes is None:
            raise
        make_room(store, missing)
        select_rows(store, index)
        return

    store.pool.free_list.give(given)
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
