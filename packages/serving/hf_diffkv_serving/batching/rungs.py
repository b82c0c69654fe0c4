"""Rungs of the requests in slots: precise while there are pages, and lowered row by row when there are none left.

It is what `generate()` does under a budget (`hf_diffkv/store/lowering.py`), with requests that come and go. A row is a
layer, slot and KV head. All its tokens are at the precise rung, or at the final one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_diffkv.heads.harm import Harm
from hf_diffkv.ops.backend import compute_dtype
from hf_diffkv.store.lower_rows import lower_rows
from hf_diffkv.store.lowering import Demand, rows_to_lower
from hf_diffkv.store.prompt_kernels import pages_of

from .page_bounds import PageBounds
from .slot_part import SlotPart
from .slot_room import SlotRoom

# one page in so many stays free when a request enters precisely, for the next tokens of all
RESERVE = 8
# tokens of rows that are lowered in a forward for requests that wait
ROW_TOKENS = 1 << 16


@dataclass(frozen=True)
class RungCounts:
    """What rows hold at a moment.

    Attributes:
        precise: name of the precise rung.
        tokens: tokens outside windows, int64 [layers, slots, heads].
        final: whether a row is at the final rung or would be if all were lowered that may be, bool of the same shape.
        precise_tokens: number of tokens in rows at the precise rung.
        lowered: number of tokens that were lowered so far.
        pages: pages that are free, or would be if all were lowered that may be.
        sizes: tokens of a page at the precise and at the final rung.
        longest: tokens of the longest request.
    """

    precise: str
    tokens: np.ndarray
    final: np.ndarray
    precise_tokens: int
    lowered: int
    pages: int
    sizes: tuple[int, int]
    longest: int

    @property
    def precise_share(self) -> float:
        """Share of the tokens at the precise rung; 1 if there are none."""
        total = int(self.tokens.sum())
        return self.precise_tokens / total if total else 1.0

    @property
    def room(self) -> int:
        """Number of tokens that each request can still get, at least, once all are lowered that may be."""
        size = np.where(self.final, self.sizes[1], self.sizes[0])
        held = pages_of(self.tokens, size)
        if not self.tokens.size:
            return self.longest

        def needed(more: int) -> int:
            return int((pages_of(self.tokens + more, size) - held).sum())

        return max(0, bisect_right(range(self.longest + 1), self.pages, key=needed) - 1)


@dataclass(frozen=True)
class PlannedRequests:
    """The requests in slots while a forward is planned.

    Attributes:
        coming: tokens that pages are reserved for, by slot of each request.
        seen: tokens so far of the request in each slot.
        room: number of slots and their length.
    """

    coming: Mapping[int, int]
    seen: Sequence[int]
    room: SlotRoom


class SlotRungs:
    """Chooses and lowers rows of the slots of a part. Its methods need what `SlotPart.look` has read.

    Args:
        part: the only part of the slots, without requests.
        harm: predicted loss by lowering each head of each layer; None if it is not known.

    Attributes:
        lowered: number of tokens that were lowered so far.
    """

    def __init__(self, part: SlotPart, harm: Harm | None) -> None:
        self.part, self.lowered = part, 0
        part.lowers = True
        store = part.store
        self._sizes = (store.layout.high.capacity, store.layout.low.capacity)
        store.lowering.harm = None if harm is None else np.array(harm)
        precise = np.full((store.num_layers, store.num_heads), self._sizes[0])
        self._precise: PageBounds = replace(part.bounds, page_tokens=precise)
        # tokens that may still be lowered for requests that wait, and what these were refused since the last forward
        self._left = ROW_TOKENS
        self._in_vain: list[np.ndarray] = []
        if store.rounds_for_queries:
            shape = (store.num_layers, store.num_heads, store.key_dim, store.key_dim)
            store.lowering.moments = torch.zeros(shape, dtype=compute_dtype(store.dtype), device=store.device)

    def begin_forward(self) -> None:
        """Says that another forward is planned from here on."""
        self._left = ROW_TOKENS
        self._in_vain.clear()

    def note_release(self) -> None:
        """Says that a request has given back what it held."""
        self._in_vain.clear()

    def enter(self, slot: int, tokens: int) -> None:
        """Chooses the rung of a request that has no tokens yet: precise if all of it fits, with pages to spare.

        Args:
            tokens: tokens of its prompt; 0 takes the final rung.
        """
        part = self.part
        spare = part.unreserved - part.max_pages // RESERVE
        precise = tokens > 0 and self._precise.pages(tokens) <= spare
        part.store.alpha_high[:, slot] = 0.0 if precise else math.inf
        part.final[:, slot] = not precise

    def lower_for(self, slot: int, tokens: int, sizes: Sequence[tuple[int, int]], requests: PlannedRequests) -> bool:
        """Lowers rows until a request gets `tokens` more tokens; whether any were lowered.

        Args:
            slot: slot of the request.
            sizes: numbers of slots and tokens that there may be then, the best first (`SlotRoom.sizes_for`).
        """
        demand = self.demand({**requests.coming, slot: tokens}, requests.seen)
        for pages in self._pages_by_size(sizes, requests):
            chosen = self.choose(demand, pages)
            if chosen is not None and chosen.any():
                self._lower(chosen, requests)
                return True
        return False

    def lower_for_waiting(self, need: int, sizes: Sequence[tuple[int, int]], requests: PlannedRequests) -> bool:
        """Lowers rows until a request that waits gets `need` pages, or as many as may be in a forward.

        Returns:
            Whether any were lowered. There may be too few pages yet.
        """
        # what was refused is refused until something is given back
        wanted = np.array([*sizes[-1], need])
        if self._left <= 0 or any((wanted >= vain).all() for vain in self._in_vain):
            return False
        demand = self.demand(requests.coming, requests.seen)
        for pages in self._pages_by_size(sizes, requests):
            chosen = self.choose(demand, pages - need)
            if chosen is not None and chosen.any():
                self._lower(self._allowed(chosen, demand), requests)
                return True
        self._in_vain.append(wanted)
        return False

    def _pages_by_size(self, sizes: Sequence[tuple[int, int]], requests: PlannedRequests) -> Iterator[int]:
        """Yields the pages that may be taken with each number of slots and tokens."""
        pool = self.part.store.pool
        used = pool.capacity - 1 - pool.free_list.free
        for size in dict.fromkeys(sizes):
            yield int(requests.room.limits(*size)[0]) - 1 - used

    def demand(self, coming: Mapping[int, int], seen: Sequence[int]) -> Demand:
        """Returns the pages that rows need beyond those they hold.

        Args:
            coming: tokens that are going to be stored, by slot of a request.
            seen: tokens so far of the request in each slot.
        """
        exact = self.part.bounds.exact
        more = np.zeros(len(seen), dtype=np.int64)
        for slot, tokens in coming.items():
            more[slot] = max(0, seen[slot] + tokens - exact) - max(0, seen[slot] - exact)
        mine = np.zeros(len(seen), dtype=bool)
        mine[list(coming)] = True
        demand = Demand.of_growth(self.part.store, self.part.counts, more[:, None], self.part.final)
        # pages of one size are counted, not bytes
        return replace(demand, may_lower=demand.may_lower & mine[:, None] & ~self._shared(), page_bytes=1)

    def choose(self, demand: Demand, pages: int) -> np.ndarray | None:
        """Chooses rows to lower until `demand` fits into `pages` pages; None if it cannot.

        Returns:
            Rows, bool [layers, slots, heads].
        """
        # the next token of a lowered row may need a page where the row had room before
        several = replace(demand, may_lower=demand.may_lower & (demand.stay - demand.lowered > 1))
        chosen = rows_to_lower([several], pages) or rows_to_lower([demand], pages)
        return None if chosen is None else chosen[0]

    def _allowed(self, chosen: np.ndarray, demand: Demand) -> np.ndarray:
        """Returns those of the rows `chosen` that may be lowered in this forward for requests that wait.

        These are the first of at most `ROW_TOKENS` tokens all together, or a single row of more.
        """
        gain = np.maximum(demand.stay - demand.lowered, 1)
        rows = np.flatnonzero(chosen)
        rows = rows[np.argsort((demand.harm / gain).ravel()[rows], kind="stable")]
        tokens = self.part.counts.ravel()[rows].cumsum()
        count = int(np.searchsorted(tokens, self._left, side="right"))
        rows = rows[: max(count, int(self._left == ROW_TOKENS))]
        self._left = self._left - int(tokens[rows.size - 1]) if rows.size else 0
        allowed = np.zeros_like(chosen)
        allowed.ravel()[rows] = True
        return allowed

    def _lower(self, chosen: np.ndarray, requests: PlannedRequests) -> None:
        """Lowers rows, bool [layers, slots, heads], and reserves anew what the requests of these were promised."""
        part = self.part
        self.lowered += int(part.counts[chosen].sum())
        lower_rows(part.store, torch.from_numpy(chosen).to(part.store.device))
        part.look()
        slots = [slot for slot in np.flatnonzero(chosen.any((0, 2))).tolist() if requests.coming[slot]]
        for slot in slots:
            part.reservations.withdraw(slot)
        for slot in slots:
            part.reserve(slot, part.need(slot, requests.seen[slot], requests.coming[slot]))

    def reclaimable(self, slots: Collection[int]) -> int:
        """Returns the pages that lowering all rows of `slots` that may be lowered would free."""
        demand = self.demand(dict.fromkeys(slots, 0), [0] * self.part.counts.shape[1])
        return int(np.where(demand.may_lower, demand.stay - demand.lowered, 0).sum())

    def least_need(self, slot: int, seen: int, tokens: int) -> int:
        """Returns the pages that `tokens` more tokens take if the rows of a request are lowered that may be.

        Pages that lowering what the request holds would free are not taken off; `reclaimable` has them.
        """
        of_all = [0] * self.part.counts.shape[1]
        of_all[slot] = seen
        coming, held = (self.demand({slot: number}, of_all) for number in (tokens, 0))
        rows = np.where(coming.may_lower, coming.lowered - held.lowered, coming.stay - held.stay)
        return int(rows[:, slot].sum())

    def counts(self, slots: list[int], longest: int) -> RungCounts:
        """Returns what the rows of `slots` hold."""
        part = self.part
        tokens, final = part.counts[:, slots], part.final[:, slots]
        low = final | ~self._shared()[:, slots]
        precise = int(tokens[~final].sum())
        pages = part.unreserved + part.reservations.all_promised + self.reclaimable(slots)
        name = part.store.config.high.full_name
        return RungCounts(name, tokens, low, precise, self.lowered, pages, self._sizes, longest)

    def _shared(self) -> np.ndarray:
        """Returns which rows have pages with other owners, bool [layers, slots, heads]."""
        store = self.part.store
        if store.pool.sharers is None:
            return np.zeros(self.part.counts.shape, dtype=bool)
        table = store.table.table
        return (store.pool.owners(table.flatten()) > 1).view(table.shape).any(-1).cpu().numpy()
