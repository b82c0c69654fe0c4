"""Keeps a store under `max_bytes` by lowering whole rows from the precise to the final precision (`until_full`).

All tokens of a row (layer, request, KV head) have one precision: the high one, or the low one once its `alpha_high` is
infinite. Rows that lose least for each byte go first. What is lowered stays so, and nothing is lowered more than once.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.backend import compute_dtype
from ..pages import HIGH, LOW, NULL_PAGE, column
from ..pages.pool import FREE
from ..pages.segments import Contents
from .prompt_kernels import pages_of
from .state import Store

_logger = logging.getLogger("hf_diffkv")
# tokens that are lowered at once, unless a single row has more
TOKENS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Demand:
    """Pages that rows take beyond those they hold, int64 [layers, batch, heads] each; negative numbers are given back.

    Attributes:
        stay: pages if the row keeps its precision.
        lowered: pages if the row is lowered; unused for rows that are.
        may_lower: whether the row may be lowered, bool.
    """

    stay: np.ndarray
    lowered: np.ndarray
    may_lower: np.ndarray

    @classmethod
    def of_growth(cls, store: Store, held: np.ndarray, more: np.ndarray | int, final: np.ndarray) -> Demand:
        """Returns the demand of rows that hold `held` tokens outside their windows and get `more`.

        Args:
            final: whether the row is at the final precision, bool.
        """
        high, low = store.layout.high.capacity, store.layout.low.capacity
        now = pages_of(held, np.where(final, low, high))
        after = pages_of(held + more, low)
        return cls(np.where(final, after, pages_of(held + more, high)) - now, after - now, ~final)


def rows_to_lower(demand: Demand, harm: np.ndarray, pages: int) -> np.ndarray | None:
    """Chooses the rows to lower until the demand of all rows fits, those of least harm for each page first.

    Args:
        harm: loss by lowering a row, [layers, batch, heads].
        pages: number of pages that may be taken.

    Returns:
        Rows to lower, bool [layers, batch, heads]; None if the demand does not fit even if all are lowered.
    """
    lacking = int(demand.stay.sum()) - pages
    chosen = np.zeros(demand.stay.shape, dtype=bool)
    if lacking <= 0:
        return chosen
    gain = np.where(demand.may_lower, demand.stay - demand.lowered, 0)
    # equal rows are taken in turn from all layers
    layer, request, head = np.nonzero(gain > 0)
    freed = gain[layer, request, head]
    order = np.lexsort((layer, request, head, harm[layer, request, head] / freed))
    enough = int(np.searchsorted(freed[order].cumsum(), lacking)) + 1
    if enough > order.size:
        return None
    first = order[:enough]
    chosen[layer[first], request[first], head[first]] = True
    return chosen


def available(store: Store, free: int | None = None) -> int:
    """Returns the number of pages that may be taken; `free` as in `PagePool.ensure_free`."""
    free = store.pool.free_list.free if free is None else free
    return free + max(0, store.pool.max_pages - store.pool.capacity)


def make_fit(store: Store, demand: Demand, pages: int) -> np.ndarray:
    """Lowers rows until `demand` fits into `pages` pages, and returns these rows, bool [layers, batch, heads].

    Raises:
        MemoryError: it does not fit even if all rows are lowered; nothing has changed.
    """
    chosen = rows_to_lower(demand, _harm(store), pages)
    if chosen is None:
        least = np.where(demand.may_lower, demand.lowered, demand.stay)
        raise MemoryError(
            f"max_bytes={store.config.max_bytes} is full: with all tokens at {store.config.low.full_name}, "
            f"{int(least.sum()) - pages} more pages of {store.pool.page_bytes} bytes are needed; raise max_bytes, "
            "choose fewer bits, use fewer sequences, or give until_full=None, which prunes tokens instead."
        )
    if chosen.any():
        mask = torch.from_numpy(chosen).to(store.device)
        store.lowering.tokens += int(store.high_count[mask].sum())
        lower_rows(store, mask)
        _tell(store)
    return chosen


def make_room_for_steps(store: Store, held: np.ndarray, lookahead: int, free: int) -> None:
    """Lowers rows until the next `lookahead` tokens of each row fit. Raises as `make_fit`.

    Args:
        held: tokens of each row outside its window, int64 [layers, batch, heads].
    """
    (final,) = store.look(store.low_heads)
    make_fit(store, Demand.of_growth(store, held, lookahead, final.astype(bool)), available(store, free))


def make_room_for_prompt(store: Store, tokens: int, valid: Tensor | None) -> None:
    """Lowers rows until several new tokens fit in all layers; the first layer of a forward does so for all.

    A row without stored tokens is lowered before its tokens come, so they are quantised once.

    Args:
        tokens: new tokens of each request, padding included.
        valid: True for real tokens, bool [batch, tokens]; None if all are.

    Raises:
        MemoryError: the tokens do not fit; nothing is lowered.
    """
    if store.lowering.made_room:
        return
    real = torch.full_like(store.length[0], tokens) if valid is None else valid.sum(-1)
    state = (store.high_count, store.low_count, store.low_heads, store.length, store.window_start)
    high, low, final, length, start, real, free = store.look(*state, real, store.pool.free_list.state[FREE])
    held, leaving = high + low, np.maximum(start, length + real - store.config.window) - start
    if store.rounds_for_queries and store.moments is None and store.lowering.moments is None:
        shape = (store.num_layers, store.num_heads, store.key_dim, store.key_dim)
        store.lowering.moments = torch.zeros(shape, dtype=compute_dtype(store.dtype), device=store.device)
    store.ensure_width(int((held + leaving[..., None]).max()) + store.window_slots)
    store.update_limit()
    final, more = final.astype(bool), leaving[..., None]
    final |= make_fit(store, Demand.of_growth(store, held, more, final), available(store, int(free)))
    # taken at once, as the limit may fall by a page while the layers store their tokens
    store.pool.ensure_free(int(Demand.of_growth(store, held, more, final).stay.sum()))
    store.lowering.made_room = True


def make_room_for_copies(store: Store, index: Tensor, more: int) -> None:
    """Lowers rows, and shrinks the pool, until a new batch fits. Raises as `make_fit`.

    Args:
        index: old request of each new one, int64 [new batch size].
        more: bytes outside the pool that the new batch needs beyond those of the old one.
    """
    store.update_limit(more)
    copies = np.bincount(index.cpu().numpy(), minlength=store.batch_size)
    state = (store.high_count, store.low_count, store.low_heads, store.pool.free_list.state[FREE])
    high, low, final, free = store.look(*state)
    held, final, times = high + low, final.astype(bool), copies[:, None]
    demand = Demand.of_growth(store, held, 0, final)
    now = pages_of(held, np.where(final, store.layout.low.capacity, store.layout.high.capacity))
    # a request that is dropped gives its pages back and is not worth lowering
    stay = now * (times - 1)
    lowered = np.where(times > 0, (demand.lowered + now) * times - now, stay)
    make_fit(store, Demand(stay, lowered, ~final), _left(store, int(free), more))
    _shrink(store, more)


def room(store: Store) -> int:
    """Returns the number of tokens that each request can still get with all rows at the final precision."""
    state = (store.high_count, store.low_count, store.low_heads, store.pool.free_list.state[FREE])
    high, low, final, free = store.look(*state)
    held, final, pages = high + low, final.astype(bool), available(store, int(free))

    def needed(more: int) -> int:
        demand = Demand.of_growth(store, held, more, final)
        return int(np.where(final, demand.stay, demand.lowered).sum())

    most = (store.pool.capacity + pages) * store.layout.low.capacity
    return max(0, bisect_right(range(most + 1), pages, key=needed) - 1)


def give_way(store: Store, more: int) -> None:
    """Lowers rows and shrinks the pool until `more` bytes outside of it fit into the budget. Raises as `make_fit`."""
    if not store.lowering.active or more <= 0:
        return
    store.update_limit(more)
    if store.pool.capacity <= store.pool.max_pages:
        return
    state = (store.high_count, store.low_count, store.low_heads, store.pool.free_list.state[FREE])
    high, low, final, free = store.look(*state)
    make_fit(store, Demand.of_growth(store, high + low, 0, final.astype(bool)), _left(store, int(free), more))
    _shrink(store, more)


def _left(store: Store, free: int, more: int) -> int:
    """Returns the pages that may be taken beside `more` bytes, for which the pool has to shrink; may be negative."""
    return available(store, free) if more <= 0 else free + store.pool.max_pages - store.pool.capacity


def _shrink(store: Store, more: int) -> None:
    """Shrinks the pool to its limit if `more` bytes have to fit beside it."""
    if more > 0 and store.pool.capacity > store.pool.max_pages:
        store.pool.truncate(store.pool.max_pages, store.table.table)
        store.forget_bounds()


def note_queries(store: Store, layer: int, moment: Tensor | None) -> None:
    """Adds a prompt's queries to those for which keys are rounded when they are lowered.

    Args:
        moment: `second_moment` of the queries, [batch * heads, key_dim, key_dim]; None if nothing is rounded.
    """
    if store.lowering.moments is not None and moment is not None:
        store.lowering.moments[layer] += moment.unflatten(0, (store.batch_size, store.num_heads)).sum(0)


def lower_rows(store: Store, chosen: Tensor) -> None:
    """Moves all tokens of some rows to the low tier, and makes them stay there.

    The memory beside the pages is that of `TOKENS_AT_ONCE` tokens or of the longest row, dense. No pages are needed, as
    each row gives up its pages before it takes fewer.

    Args:
        chosen: rows at the high precision, bool [layers, batch, heads].
    """
    row = chosen.view(-1).nonzero()[:, 0]
    count = store.high_count.view(-1)[row].long()
    parts, first, total = [], 0, 0
    for index, tokens in enumerate(count.tolist()):
        if total + tokens > TOKENS_AT_ONCE and index > first:
            parts.append(slice(first, index))
            first, total = index, 0
        total += tokens
    for part in (*parts, slice(first, row.numel())):
        _lower(store, row[part], count[part])
        # in place, because captured steps read them there
        store.alpha_high.view(-1)[row[part]] = math.inf
    store.forget_bounds()


def _lower(store: Store, row: Tensor, count: Tensor) -> None:
    """Moves all tokens of the rows `row`, int64 [n], of `count` tokens each, to the low tier."""
    high, low = store.layout.high, store.layout.low
    table = store.table.table.view(-1, store.table.width)
    if not int(count.sum()):
        return
    place = torch.repeat_interleave(torch.arange(row.numel(), device=row.device), count)
    index = torch.arange(place.numel(), device=row.device) - (count.cumsum(0) - count)[place]
    page = table[row[place], column(HIGH, index // high.capacity, table.shape[1])].long()
    key, value = store.ops.load_tokens(store.pool.pages, high, page, index % high.capacity, store.dtype)
    key = _rounded(store, row, place, key)
    old = page[index % high.capacity == 0]
    is_high = torch.arange(table.shape[1], device=row.device) < pages_of(count, high.capacity)[:, None]
    table[row] = table[row].masked_fill(is_high, NULL_PAGE)
    store.pool.free_list.give(old)
    need = pages_of(count, low.capacity)
    owner, fresh = store.pool.free_list.take(need)
    ordinal = torch.arange(owner.numel(), device=row.device) - (need.cumsum(0) - need)[owner]
    table[row[owner], column(LOW, ordinal, table.shape[1])] = fresh.to(table.dtype)
    page = table[row[place], column(LOW, index // low.capacity, table.shape[1])].long()
    nothing = torch.zeros(place.numel(), device=row.device)
    contents = Contents(key, value, nothing, nothing.long())
    store.ops.store_tokens(store.pool.pages, low, page, index % low.capacity, contents, store.dtype)
    store.low_count.view(-1)[row] = count.to(store.low_count.dtype)
    store.high_count.view(-1)[row] = 0


def _rounded(store: Store, row: Tensor, place: Tensor, key: Tensor) -> Tensor:
    """Rounds keys, [n, key_dim], for the model's queries if their moments are known, else for those of its prompts.

    Args:
        row: rows of the keys, int64 [rows].
        place: index into `row` of each key, int64 [n].
    """
    feedback = store.model_feedback
    if feedback is not None:
        matrices = feedback.matrices[feedback.of_rows(store.high_count.numel())[row]]
    elif store.lowering.moments is not None:
        head = row // (store.batch_size * store.num_heads) * store.num_heads + row % store.num_heads
        matrices = store.ops.feedback_of(store.lowering.moments.flatten(0, 1)[head], store.key_rotation)
    else:
        return key
    return store.ops.round_keys(key, place, matrices, store.layout.low)


def _harm(store: Store) -> np.ndarray:
    """Returns the loss by lowering each row, [layers, batch, heads]; the same for all if nothing was measured."""
    shape = tuple(store.high_count.shape)
    if store.lowering.harm is None:
        return np.ones(shape)
    return np.broadcast_to(store.lowering.harm[store.layers][:, None], shape)


def _tell(store: Store) -> None:
    """Tells once that lowering has begun, and once that all rows are at the final precision."""
    precise, final = store.config.high.full_name, store.config.low.full_name
    if not store.lowering.told_full:
        store.lowering.told_full = True
        _logger.warning(
            "max_bytes=%d is full: from here on heads are lowered from %s to %s, the least harmful ones first.",
            *(store.config.max_bytes, precise, final),
        )
    if not store.lowering.told_final and bool(store.low_heads.all()):
        store.lowering.told_final = True
        _logger.warning("all is at %s, room for about %d tokens.", final, room(store))
