"""Keeps stores under `max_bytes` by lowering whole rows from their first to their final precision (`until_full`).

All tokens of a row (layer, request, KV head) have one precision: the high one of its store, or the low one once its
`alpha_high` is infinite. A store goes through stages: once all its rows are low, the low precision becomes the high one
and the next precision the low one. Rows that lose the least per byte go first, across all stores that share a budget.
Pages that one store gives back are used by others. Lowered rows stay lowered.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..config.until_full import joined_names
from ..pages.pool import FREE
from ..pages.rows import compute_dtype
from .demand import Demand, capacities, page_bytes, rows_to_lower
from .faults import GROWTH_PART, with_growth
from .forks import make_private
from .lower_rows import lower_to
from .prompt_kernels import pages_of
from .state import Changing, Store

_logger = logging.getLogger("hf_diffkv")


@dataclass(frozen=True)
class Part:
    """What one store asks of the budget.

    Attributes:
        demand: pages that its rows need.
        held: tokens of each row outside its window, int64 [layers, batch, heads].
        free: free pages.
        more: further bytes that are needed outside the pool.
    """

    store: Store
    demand: Demand
    held: np.ndarray
    free: int
    more: int = 0

    @classmethod
    def of_growth(cls, store: Store, tokens: np.ndarray | int, more: int = 0) -> Part:
        """Returns what a store asks if its rows gain `tokens` tokens."""
        held, final, free = _held(store)
        return cls(store, Demand.of_growth(store, held, tokens, final), held, free, more)

    def lowers(self, rungs: np.ndarray) -> bool:
        """Returns whether some row is lowered to get to `rungs`."""
        return bool((rungs > self.demand.now).any())

    def need(self, rungs: np.ndarray) -> int:
        """Returns the free pages taken once rows have been lowered to `rungs`; negative if pages are given back.

        Pages that lowering itself gives back are free by then; those of dropped requests are not.
        """
        return int((self.demand.at(rungs) + self.pages(self.demand.now) - self.pages(rungs)).sum())

    def pages(self, rungs: np.ndarray) -> np.ndarray:
        """Returns the pages that the tokens of each row use at `rungs`, int64 [layers, batch, heads]."""
        return pages_of(self.held, self.demand.capacity[rungs])


def together(store: Store) -> list[Store]:
    """Returns the stores that share the budget of `store`, each with its own memory.

    A compaction due in one of them may belong to the step that has just begun.
    """
    known = [reference() for reference in store.lowering.together]
    stores = [each for each in known if each is not None] or [store]
    for each in stores:
        make_private(each)
    return stores


def _for_pages(stores: Iterable[Store], more: int = 0) -> int:
    """Returns the bytes that the pages of all stores may use besides everything else and `more` bytes."""
    fixed, total = more, 0
    for store in stores:
        total = int(store.config.max_bytes or 0)
        pool = max(0, store.pool.bytes - store.pool.capacity * page_bytes(store))
        fixed += store.bytes_outside_pool() + store.growth() + pool
    return total - total // GROWTH_PART - fixed


def _held(store: Store) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the tokens of each row outside its window, whether it is at the low precision, and the free pages."""
    state = (store.high_count, store.low_count, store.low_heads, store.pool.free_list.state[FREE])
    high, low, final, free = store.look(*state)
    return high + low, final.astype(bool), int(free)


def make_fit(parts: Sequence[Part]) -> list[np.ndarray]:
    """Lowers rows until the demand of all stores fits, and lets pages change hands.

    Returns:
        Rung of each row in each store (`Demand`), counted from the store's stage before.

    Raises:
        MemoryError: the demand does not fit even if all rows are lowered; nothing has changed.
    """
    stores, demands, more = [part.store for part in parts], [part.demand for part in parts], sum(p.more for p in parts)
    sizes = [demand.page_bytes for demand in demands]
    spare = _for_pages(stores, more) - sum(store.pool.capacity * size for store, size in zip(stores, sizes))
    # a pool that is a little above its limit shrinks only to make room for other memory
    spare = spare if more else max(0, spare)
    room = spare + sum(part.free * size for part, size in zip(parts, sizes))
    unusable = 0
    while (chosen := rows_to_lower(demands, room - unusable)) is not None:
        # pages of dropped requests serve only their own store
        own = sum(max(0, -part.need(rungs)) * size for part, rungs, size in zip(parts, chosen, sizes))
        if own <= unusable:
            break
        unusable = own
    if chosen is None:
        least = sum(demand.bytes(demand.last) for demand in demands)
        missing = with_growth(least - room + unusable)
        raise MemoryError(
            f"max_bytes={stores[0].config.max_bytes} is full: with all tokens at {names_of(stores, -1)}, {missing} "
            "more bytes are needed; raise max_bytes, choose fewer bits, use fewer sequences, or set until_full=None, "
            "which prunes tokens instead."
        )
    with Changing(*stores):
        for part, rungs in zip(parts, chosen):
            if part.lowers(rungs):
                part.store.lowering.tokens += int((part.held * (rungs - part.demand.now)).sum())
                lower_to(part.store, rungs)
        _share_pages(parts, chosen, spare)
    if any(map(Part.lowers, parts, chosen)):
        _tell(stores)
    return chosen


def _share_pages(parts: Sequence[Part], chosen: Sequence[np.ndarray], spare: int) -> None:
    """Shrinks pools that hold free pages which other stores need, and tells all stores their new limits.

    What is left is divided so that all stores run out of pages at about the same time.

    Args:
        spare: bytes by which all pools together may grow; negative if they have to shrink.
    """
    sizes, free = [part.demand.page_bytes for part in parts], [part.store.pool.free_list.free for part in parts]
    need = [max(0, part.need(rungs)) for part, rungs in zip(parts, chosen)]
    lacking = sum(max(0, n - f) * size for n, f, size in zip(need, free, sizes))
    if lacking > spare:
        left = max(0, spare + sum((f - n) * size for n, f, size in zip(need, free, sizes)))
        # bytes that one more token in each row takes on average
        shares = [(1 / part.demand.capacity[rungs]).sum() * size for part, rungs, size in zip(parts, chosen, sizes)]
        for part, n, f, size, share in zip(parts, need, free, sizes, shares):
            pool = part.store.pool
            pool.truncate(pool.capacity - f + n + int(left * share / sum(shares) / size), part.store.table.table)
    for part in parts:
        others = [other for other in parts if other is not part]
        part.store.taken = sum(other.store.bytes + other.more for other in others)
        part.store.update_limit(part.more)


def make_room_for_steps(store: Store, lookahead: int) -> list[Store]:
    """Lowers rows until the next `lookahead` tokens of each row fit, in all stores. Raises as `make_fit` does.

    Returns:
        The other stores in which rows were lowered.
    """
    parts = [Part.of_growth(each, lookahead) for each in together(store)]
    return [part.store for part, rungs in zip(parts, make_fit(parts)) if part.lowers(rungs) and part.store is not store]


def make_room_for_prompt(store: Store, tokens: int, valid: Tensor | None) -> None:
    """Lowers rows until several new tokens fit in all layers of all stores; the first layer of a forward does so.

    A row without stored tokens is lowered before its tokens arrive, so they are quantised only once.

    Args:
        tokens: new tokens of each request, padding included.
        valid: True for real tokens, bool [batch, tokens]; None if all are.

    Raises:
        MemoryError: the tokens do not fit; nothing is lowered.
    """
    if store.lowering.made_room:
        return
    parts = [_part_of_prompt(each, tokens, valid) for each in together(store)]
    store.update_limit()
    for part, rungs in zip(parts, make_fit(parts)):
        # taken at once, as the limit may fall by a page while the layers store their tokens
        part.store.pool.ensure_free(max(0, part.need(rungs)))
        part.store.lowering.made_room = True


def _part_of_prompt(store: Store, tokens: int, valid: Tensor | None) -> Part:
    """Returns what a store asks for new tokens; layers that have stored theirs ask for nothing."""
    state = store.lowering
    real = torch.full_like(store.length[0], tokens) if valid is None else valid.sum(-1)
    length, start, real = store.look(store.length, store.window_start, real)
    state.after = length + real if state.after is None else state.after
    leaving = (np.maximum(start, state.after - store.config.window) - start)[..., None]
    if store.rounds_for_queries and store.moments is None and state.moments is None:
        shape = (store.num_layers, store.num_heads, store.key_dim, store.key_dim)
        state.moments = torch.zeros(shape, dtype=compute_dtype(store.dtype), device=store.device)
    part = Part.of_growth(store, leaving)
    store.ensure_width(int((part.held + leaving).max()) + store.window_slots)
    return part


def make_room_for_copies(store: Store, index: Tensor) -> None:
    """Lowers rows, and shrinks pools, until a new batch fits in all stores. Raises as `make_fit` does.

    Args:
        index: old request of each new one, int64 [new batch size].
    """
    copies = np.bincount(index.cpu().numpy(), minlength=store.batch_size)[:, None]
    parts = []
    for each in together(store):
        more = (each.bytes - each.pool.bytes) * max(0, index.numel() - each.batch_size) // each.batch_size
        part = Part.of_growth(each, 0, more)
        now = part.pages(part.demand.now)
        # a dropped request gives its pages back and is not worth lowering
        pages = np.where(copies > 0, (part.demand.pages + now) * copies - now, -now)
        parts.append(replace(part, demand=replace(part.demand, pages=pages)))
    make_fit(parts)
    _forget_bounds(parts)


def room(stores: Sequence[Store]) -> int:
    """Returns the number of tokens that each request can still get with all rows at the final precision.

    Args:
        stores: all stores of a device.
    """
    parts = [(store, *_held(store)) for store in stores]
    left = _for_pages(stores)
    most = 0
    for store, _, _, free in parts:
        left -= (store.pool.capacity - free) * page_bytes(store)
        most += (store.pool.capacity + max(0, left) // page_bytes(store)) * capacities(store)[-1]

    def needed(more: int) -> int:
        demands = [Demand.of_growth(store, held, more, final) for store, held, final, _ in parts]
        return sum(demand.bytes(demand.last) for demand in demands)

    return max(0, bisect_right(range(most + 1), left, key=needed) - 1)


def give_way(store: Store, more: int, of_layer: int = 0, queries: int = 0) -> None:
    """Lowers rows and shrinks pools until `more` bytes outside them fit into the budget. Raises as `make_fit` does.

    Args:
        more: bytes that `store` needs.
        of_layer: bytes of keys and values that each layer records in this forward; stores whose turn is still to come
            need them too.
        queries: further bytes that it records, the same for any number of KV heads.
    """
    if not store.lowering.active or more <= 0:
        return
    stores, width = together(store), store.num_heads * (store.key_dim + store.value_dim)
    wanted = [more] * len(stores)
    for number, other in enumerate(stores):
        if other is not store:
            wide = other.num_heads * (other.key_dim + other.value_dim) / width
            layers = other.num_layers + other.readers if _recorded(other) <= _recorded(store) else 0
            # what it has promised is already counted
            wanted[number] = 0 if other.lowering.promised else int(of_layer * wide + queries) * layers
    if _for_pages(stores, sum(wanted)) < sum(each.pool.capacity * page_bytes(each) for each in stores):
        parts = [Part.of_growth(each, 0, bytes_more) for each, bytes_more in zip(stores, wanted)]
        make_fit(parts)
        _forget_bounds(parts)
    for other, bytes_more in zip(stores, wanted):
        if other is not store:
            other.lowering.promised += bytes_more


def _forget_bounds(parts: Iterable[Part]) -> None:
    """Makes stores look again before their next step, as free pages may have been taken from them."""
    for part in parts:
        part.store.forget_bounds()


def _recorded(store: Store) -> int:
    return 0 if store.recorded[0] is None else store.recorded[0].tokens


def names_of(stores: Iterable[Store], rung: int) -> str:
    """Returns the names of the stores' precisions at a rung, from most to fewest bits.

    Args:
        rung: index into `Store.precisions`: 0 for the first ones, -1 for the last ones.
    """
    return joined_names(store.precisions[rung] for store in stores)


def _tell(stores: Sequence[Store]) -> None:
    """Logs once that lowering has begun, and once that all rows are at the final precision."""
    states = [store.lowering for store in stores]
    precise, final = names_of(stores, 0), names_of(stores, -1)
    if not any(state.told_full for state in states):
        _logger.warning(
            "max_bytes=%d is full: from now on, heads are lowered from %s to %s, the least harmful first.",
            *(int(stores[0].config.max_bytes or 0), precise, final),
        )
    done = all(map(_is_final, stores))
    if done and not any(state.told_final for state in states):
        _logger.warning("everything is at %s, with room for about %d tokens.", final, room(stores))
    for state in states:
        state.told_full, state.told_final = True, state.told_final or done


def _is_final(store: Store) -> bool:
    """Returns whether all rows have their final precision."""
    keeps, low = store.lowering.keeps, store.low_heads.cpu().numpy()
    return store.stage == len(store.layouts) - 1 and bool((low | (False if keeps is None else keeps[:, None])).all())
