"""The layers of slots that share one store: the pages that requests hold there, and those that they may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_diffkv.cache.stores import Stores
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.layers import same_pages
from hf_diffkv.pages import NULL_PAGE
from hf_diffkv.pages.rows import ROW_STATE
from hf_diffkv.store.kv_heads import KVHeads
from hf_diffkv.store.state import Store
from hf_diffkv.store.step import begin_forward

from .page_bounds import PageBounds
from .reservations import Reservations, ReservedPool
from .shapes import AttentionShape
from .shared_pages import Entries, entries_of_request, entries_of_slot, fill_entries
from .slot_store import SlotStore
from .staging import stage
from .until_full import layer_of_slots, rung_config


class SlotPart:
    """Slots of one store. A request has the same slot in every part of `Slots`.

    Args:
        store: empty store with the thresholds of its layers.
        query_heads: number of query heads of a layer.
        alone: whether no other rank counts the pages.

    Attributes:
        shares: whether requests share pages.
        bounds: pages of a request by its length; if rows are lowered, of one whose rows all are.
        lowers: whether the rows of different requests may be at different rungs.
        staged: requests with several tokens in the running forward, by slot, as separate stores.
    """

    def __init__(self, store: SlotStore, query_heads: int, alone: bool) -> None:
        self.store = store
        self.shares = alone and not store.layout.selects
        store.begin(query_heads)
        exact = store.config.sinks + store.config.window
        self.bounds = PageBounds(exact, store.page_tokens(), store.layout.selects)
        self.lowers = False
        self.reservations = Reservations(store.pool)
        self.staged: dict[int, Store] = {}

    def set_limit(self, pages: int) -> None:
        """Limits the pages, including the null page. Gives back the memory of pages beyond that, which must be unused.

        Raises:
            MemoryError: memory cannot be given back in such small pieces.
        """
        pool = self.store.pool
        pool.max_pages = pages
        if pages < pool.capacity:
            pool.truncate(pages, self.store.table.table)
            self.reservations.look_again()
            if pool.granularity and pool.slack > pool.granularity:
                raise MemoryError(f"{pool.slack} bytes after the pages cannot be returned.")

    def resize(self, slots: int, tokens: int) -> None:
        """Calls `SlotStore.resize`, and counts pages again."""
        self.store.resize(slots, tokens)
        self.look()

    def move(self, slot: int, to: int) -> None:
        """Moves a slot's content, including pages, sums and reservations, to the empty slot `to`."""
        self.store.move(slot, to)
        self.reservations.rename(slot, to)
        self.look()

    @property
    def max_pages(self) -> int:
        """Pages that requests may hold: all but the null page."""
        return int(self.store.pool.max_pages) - 1

    @property
    def used(self) -> int:
        """Number of pages that requests hold."""
        pool = self.store.pool
        return int(pool.capacity - 1 - pool.free_list.free)

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each row outside its window, int64 [layers, slots, heads]."""
        return self.store.counts

    @property
    def final(self) -> np.ndarray:
        """Which rows are at the low precision, bool [layers, slots, heads]."""
        return self.store.final

    def look(self) -> None:
        """Runs the compaction that is due and reads what every request holds, and what its next token may need."""
        self._step, self._held, self._partial = (rows.sum((0, 2), dtype=np.int64) for rows in self.store.look())
        self.reservations.look_again()

    def bounds_of(self, final: np.ndarray) -> PageBounds:
        """Returns the bounds of a request whose rows `final`, bool [layers, heads], are at the low precision."""
        if not self.lowers:
            return self.bounds
        layout = self.store.layout
        return replace(self.bounds, page_tokens=np.where(final, layout.low.capacity, layout.high.capacity))

    def numbers(self) -> np.ndarray:
        """Returns int64 [2 + 2 * slots], from which other ranks count pages as this one does. Only after `look`."""
        free = self.unreserved + self.reservations.all_promised
        return np.concatenate([[self.max_pages, free], self._held, self._step])

    def settle(self) -> None:
        """Ends the last forward: takes back every reservation and calls `look`."""
        self.reservations.clear()
        self.staged.clear()
        self.look()

    def need(self, slot: int | None, seen: int, tokens: int) -> int:
        """Returns the most pages that `tokens` more tokens need, given `seen` ones; arguments as in `Slots`."""
        if slot is None:
            return self.bounds.more(seen, tokens, 0, 0)
        return self.bounds_of(self.final[:, slot]).more(seen, tokens, self.held(slot), int(self._step[slot]))

    def need_of(self, source: Store, tokens: int) -> int:
        """Returns the most pages that the request in `source`, a store of these layers, needs with `tokens` tokens."""
        return self.bounds_of(source.low_heads[:, 0].cpu().numpy()).pages(tokens)

    def held(self, slot: int) -> int:
        """Pages of the request in `slot`."""
        return int(self._held[slot])

    @property
    def unreserved(self) -> int:
        """Pages that may still be reserved."""
        return self.reservations.unreserved

    def promised(self, slot: int) -> int:
        """Returns the number of pages reserved for `slot`."""
        return self.reservations.promised(slot)

    def reserve(self, slot: int, pages: int) -> None:
        """Reserves `pages` pages; they must be free."""
        self.reservations.reserve(slot, pages)

    def begin(self, prompts: list[tuple[int, int, int]], steps: bool, leaves: bool) -> None:
        """Starts a forward.

        Args:
            prompts: slot, past tokens and new tokens of each request that has several new ones.
            steps: whether other requests have one new token.
            leaves: whether the first token leaves the window of one of them.
        """
        for slot, seen, tokens in prompts:
            self.staged[slot] = stage(self.store, slot, seen, ReservedPool(self.reservations, slot))
            self.staged[slot].seen += tokens
        if steps:
            self.store.centers_soon = self.store.config.center and leaves
            begin_forward(self.store, 1)

    def clear(self, slot: int) -> None:
        """Frees the pages of the request in `slot` and empties the slot. Pages with other owners stay theirs."""
        store, table = self.store, self.store.table.table[:, slot]
        store.pool.release(table[table != NULL_PAGE])
        store.empty(slot)
        self._held[slot] = self.counts[:, slot] = 0
        self.final[:, slot] = True

    def withdraw(self, slot: int) -> None:
        """Takes back what is reserved for `slot`."""
        self.staged.pop(slot, None)
        self.reservations.withdraw(slot)
        self.reservations.look_again()

    def entries(self, source: Store, alike: int | None) -> Entries:
        """Returns the table entries with which `load` copies the one request of `source`.

        Args:
            source: store of the same layers, settled and without padding.
            alike: slot whose request begins alike, to share pages with.
        """
        return entries_of_request(self.store, source, alike if self.shares else None)

    def load(self, slot: int, source: Store, entries: Entries) -> None:
        """Copies the one request of `source` into the empty `slot`. After `provide`."""
        fill_entries(self.store, slot, entries, source)
        for name in ROW_STATE:
            getattr(self.store, name)[:, slot] = getattr(source, name)[:, 0]
        self.look()

    def copied(self, slot: int) -> int:
        """Pages that `copy` takes."""
        return int(self._partial[slot]) if self.shares else self.held(slot)

    def copy(self, slot: int, twin: int) -> None:
        """Copies the request in `slot` to the empty slot `twin`. After `settle` and `provide`."""
        store = self.store
        fill_entries(store, twin, entries_of_slot(store, slot, self.shares), store)
        for name in ROW_STATE:
            state = getattr(store, name)
            state[:, twin] = state[:, slot]
        self.look()

    def provide(self, pages: int) -> None:
        """Makes `pages` free pages for `load` or `copy`. Raises `MemoryError` if the device has no memory."""
        self.store.pool.ensure_free(pages)


def slot_configs(config: DiffKVConfig, num_layers: int, shape: AttentionShape) -> list[DiffKVConfig]:
    """Returns each layer's configuration, without a budget, with thresholds for the heads of this rank.

    Raises:
        ValueError: precisions or thresholds for another number of layers or heads.
    """
    known, parallel = Stores(rung_config(config), num_layers), shape.ranks.parallel
    known.tensor_parallel = parallel
    found = []
    for index in range(num_layers):
        config = layer_of_slots(known.of_layer(index, shape.num_heads))
        of_heads = {name: getattr(config, name) for name in ("alpha_high", "alpha_low")}
        mine = {name: parallel.share(a, shape.num_heads) for name, a in of_heads.items() if isinstance(a, tuple)}
        found.append(replace(config, **mine))
    return found


def make_parts(configs: Sequence[DiffKVConfig], shape: AttentionShape) -> list[SlotPart]:
    """Returns the parts, each with one slot. Layers with the same pages share a part."""
    together: list[list[int]] = []
    for index, mine in enumerate(configs):
        part = next((part for part in together if same_pages(mine, configs[part[0]])), None)
        if part is None:
            together.append([index])
        else:
            part.append(index)
    parts = []
    for indices in together:
        heads = KVHeads(shape.num_heads, shape.key_dim, shape.value_dim, shape.dtype, shape.device)
        first_head = shape.ranks.parallel.rank * shape.num_heads
        known = {"total_layers": len(configs), "first_head": first_head, "max_positions": shape.max_positions}
        store = SlotStore(configs[indices[0]], len(indices), 1, heads, **known)
        for layer, index in enumerate(indices):
            store.place_layer(layer, index)
            store.set_thresholds(layer, configs[index].alpha_high, configs[index].alpha_low)
        parts.append(SlotPart(store, shape.query_heads, shape.ranks.alone))
    return parts
