"""Choosing, repeating and dropping requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..memory import NULL_PAGE
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
    store.pool.ensure_free(max(0, source.numel() - given.numel()))

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
