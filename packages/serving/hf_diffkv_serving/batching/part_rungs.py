"""Rungs of the rows of one part of the slots. Each part has its own pages.

A row is a layer, slot and KV head. All its tokens are at the precise rung of its part, or at the final one. Heads whose
final precision is the precise one are never lowered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_diffkv.heads.harm import HarmBetween
from hf_diffkv.pages.rows import compute_dtype
from hf_diffkv.store.demand import Demand, rows_to_lower
from hf_diffkv.store.lower_rows import lower_rows
from hf_diffkv.store.prompt_kernels import pages_of

from .page_bounds import PageBounds
from .slot_part import SlotPart
from .slot_room import SlotRoom

# a request enters at the precise rung only if 1 / RESERVE of the pages stays free for next tokens
RESERVE = 8


@dataclass(frozen=True)
class PartCounts:
    """Contents of a part's rows at a moment.

    Attributes:
        tokens: tokens outside windows, int64 [layers, slots, heads].
        capacity: tokens per page of each row if all that may be lowered are, int64 of the same shape.
        precise_tokens: number of tokens in rows at the precise rung.
        pages: pages that are free, or would be if all rows that may be lowered were.
    """

    tokens: np.ndarray
    capacity: np.ndarray
    precise_tokens: int
    pages: int

    def fits(self, more: int) -> bool:
        """Returns whether each row can get `more` tokens once all that may be lowered are."""
        needed = pages_of(self.tokens + more, self.capacity) - pages_of(self.tokens, self.capacity)
        return int(needed.sum()) <= self.pages


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


class PartRungs:
    """Chooses and lowers rows of a part. Its methods need what `SlotPart.look` has read.

    Args:
        part: part of the slots, without requests.
        harm: predicted loss from lowering heads; None if unknown.

    Attributes:
        lowered: number of tokens lowered so far.
    """

    def __init__(self, part: SlotPart, harm: HarmBetween | None) -> None:
        self.part, self.lowered = part, 0
        part.lowers = True
        store = part.store
        self._sizes = (store.layout.high.capacity, store.layout.low.capacity)
        # heads of each layer whose final precision is the low one
        self._ends_low = store.low_heads[:, 0].cpu().numpy()
        store.lowering.keeps = ~self._ends_low
        known = None if harm is None else harm(store.high, store.low)
        store.lowering.harm = None if known is None else np.array(known)[None]
        precise = np.full((store.num_layers, store.num_heads), self._sizes[0])
        self._precise: PageBounds = replace(part.bounds, page_tokens=precise)
        if store.rounds_for_queries:
            shape = (store.num_layers, store.num_heads, store.key_dim, store.key_dim)
            store.lowering.moments = torch.zeros(shape, dtype=compute_dtype(store.dtype), device=store.device)

    def enter(self, slot: int, tokens: int) -> None:
        """Chooses the rung of a request that has no tokens yet: precise if all of it fits, with pages to spare.

        Args:
            tokens: tokens of its prompt; 0 for the final rung.
        """
        part, store = self.part, self.part.store
        spare = part.unreserved - part.max_pages // RESERVE
        precise = tokens > 0 and self._precise.pages(tokens) <= spare
        low = self._ends_low & (not precise)
        store.alpha_high[:, slot] = torch.where(torch.from_numpy(low).to(store.device), torch.inf, 0.0)
        part.final[:, slot] = low

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
        # counts pages of one size, not bytes
        return replace(demand, may_lower=demand.may_lower & (mine[:, None] & ~self._shared()), page_bytes=1)

    def choose(self, demand: Demand, pages: int) -> np.ndarray | None:
        """Chooses rows to lower until `demand` fits into `pages` pages; None if it cannot.

        Returns:
            Rows, bool [layers, slots, heads].
        """
        # the next token of a lowered row may need a page where the row had room before
        several = replace(demand, may_lower=demand.may_lower & (demand.gain > 1))
        chosen = rows_to_lower([several], pages) or rows_to_lower([demand], pages)
        return None if chosen is None else chosen[0] > demand.now

    def lower(self, chosen: np.ndarray, requests: PlannedRequests) -> None:
        """Lowers rows, bool [layers, slots, heads], and renews the reservations of their requests."""
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
        """Returns the pages that would be freed by lowering all rows of `slots` that may be lowered."""
        demand = self.demand(dict.fromkeys(slots, 0), [0] * self.part.counts.shape[1])
        return int(demand.gain.sum())

    def least_need(self, slot: int, seen: int, tokens: int) -> int:
        """Returns the pages that `tokens` more tokens need if all rows of a request that may be lowered are.

        Pages freed by lowering what the request holds are not subtracted; `reclaimable` counts them.
        """
        of_all = [0] * self.part.counts.shape[1]
        of_all[slot] = seen
        coming, held = (self.demand({slot: number}, of_all) for number in (tokens, 0))
        return int((coming.at(coming.last) - held.at(held.last))[:, slot].sum())

    def counts(self, slots: list[int]) -> PartCounts:
        """Returns the contents of the rows of `slots`."""
        part = self.part
        tokens, final = part.counts[:, slots], part.final[:, slots]
        low = final | self._ends_low[:, None] & ~self._shared()[:, slots]
        pages = part.unreserved + part.reservations.all_promised + self.reclaimable(slots)
        high_size, low_size = self._sizes
        return PartCounts(tokens, np.where(low, low_size, high_size), int(tokens[~final].sum()), pages)

    def _shared(self) -> np.ndarray:
        """Returns which rows have pages with other owners, bool [layers, slots, heads]."""
        store = self.part.store
        if store.pool.sharers is None:
            return np.zeros(self.part.counts.shape, dtype=bool)
        table = store.table.table
        return (store.pool.owners(table.flatten()) > 1).view(table.shape).any(-1).cpu().numpy()
