"""Rungs of the requests in slots: precise while there are pages, and lowered row by row when there are none left.

This is what `generate()` does under a budget (`hf_diffkv/store/lowering.py`), with requests that come and go. Each part
of the slots has its own pages and lowers its own rows (part_rungs.py), and a request needs pages in all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hf_diffkv.heads.harm import HarmBetween
from hf_diffkv.store.demand import Demand
from hf_diffkv.store.lowering import names_of

from .part_rungs import PartCounts, PartRungs, PlannedRequests
from .slot_part import SlotPart

# tokens of rows that a forward may lower for waiting requests
ROW_TOKENS = 1 << 16


@dataclass(frozen=True)
class RungCounts:
    """Contents of rows at a moment.

    Attributes:
        precise: names of the precise rungs, from most to fewest bits.
        lowered: number of tokens lowered so far.
        longest: tokens of the longest request.
        parts: contents of each part's rows.
    """

    precise: str
    lowered: int
    longest: int
    parts: tuple[PartCounts, ...]

    @property
    def precise_share(self) -> float:
        """Share of the tokens at the precise rung; 1 if there are none."""
        total = sum(int(part.tokens.sum()) for part in self.parts)
        return sum(part.precise_tokens for part in self.parts) / total if total else 1.0

    @property
    def room(self) -> int:
        """Minimum number of tokens that each request can still get once all rows that may be lowered are."""
        allowed = range(1, self.longest + 1)
        return bisect_left(allowed, True, key=lambda more: not all(part.fits(more) for part in self.parts))


class RungsOfParts:
    """Chooses and lowers rows of the slots. Its methods need what `SlotPart.look` has read.

    Args:
        parts: all parts of the slots, without requests.
        harm: predicted loss from lowering heads; None if unknown.
    """

    def __init__(self, parts: Sequence[SlotPart], harm: HarmBetween | None) -> None:
        self._parts = [PartRungs(part, harm) for part in parts]
        self._precise = names_of([part.store for part in parts], 0)
        # tokens that may still be lowered for waiting requests, and what these were refused since the last forward
        self._left = ROW_TOKENS
        self._in_vain: list[np.ndarray] = []

    @property
    def lowered(self) -> int:
        """Number of tokens lowered so far."""
        return sum(part.lowered for part in self._parts)

    def begin_forward(self) -> None:
        """Notes that another forward is planned from here on."""
        self._left = ROW_TOKENS
        self._in_vain.clear()

    def note_release(self) -> None:
        """Notes that a request has given back what it held."""
        self._in_vain.clear()

    def enter(self, slot: int, tokens: int) -> None:
        """Chooses the rungs of a request that has no tokens yet, as `PartRungs.enter` does for each part."""
        for part in self._parts:
            part.enter(slot, tokens)

    def lower_for(self, slot: int, tokens: int, sizes: Sequence[tuple[int, int]], requests: PlannedRequests) -> bool:
        """Lowers rows until a request can get `tokens` more tokens. Returns whether any were lowered.

        Args:
            slot: slot of the request.
            sizes: possible numbers of slots and tokens, best first (`SlotRoom.sizes_for`).
        """
        demands = [part.demand({**requests.coming, slot: tokens}, requests.seen) for part in self._parts]
        chosen = self._choose(demands, np.zeros(len(demands), dtype=np.int64), sizes, requests)
        return chosen is not None and self._lower(chosen, requests)

    def lower_for_waiting(
        self,
        need: np.ndarray,
        sizes: Sequence[tuple[int, int]],
        requests: PlannedRequests,
        keep: int | None = None,
    ) -> bool:
        """Lowers rows until a waiting request can get `need` pages, by part, or the limit of a forward is reached.

        Args:
            keep: slot whose rows stay as they are; None if there is none.

        Returns:
            Whether any were lowered. There may still be too few pages.
        """
        # a refusal stands until something is given back
        wanted = np.array([*sizes[-1], *need])
        if self._left <= 0 or any((wanted >= vain).all() for vain in self._in_vain):
            return False
        demands = [part.demand(requests.coming, requests.seen) for part in self._parts]
        if keep is not None:
            for demand in demands:
                demand.may_lower[0, :, keep] = False
        chosen = self._choose(demands, need, sizes, requests)
        if chosen is None:
            self._in_vain += [wanted] if keep is None else []
            return False
        return self._lower(self._allowed(chosen, demands), requests)

    def _choose(
        self, demands: Sequence[Demand], needs: np.ndarray, sizes: Sequence[tuple[int, int]], requests: PlannedRequests
    ) -> list[np.ndarray] | None:
        """Chooses rows to lower until all parts have the pages that they need, with the first size that gives them.

        Args:
            demands: demand of the requests in slots, by part.
            needs: additional pages needed, by part.

        Returns:
            Rows of each part, bool [layers, slots, heads], at least one in all; None if no size gives all parts enough.
        """
        taken = needs + [part.part.used for part in self._parts]
        for size in dict.fromkeys(sizes):
            # all but the null page
            pages = requests.room.limits(*size) - 1 - taken
            chosen = [part.choose(demand, int(left)) for part, demand, left in zip(self._parts, demands, pages)]
            enough = [rows for rows in chosen if rows is not None]
            if len(enough) == len(chosen) and any(rows.any() for rows in enough):
                return enough
        return None

    def _allowed(self, chosen: Sequence[np.ndarray], demands: Sequence[Demand]) -> list[np.ndarray]:
        """Returns which of the `chosen` rows may be lowered in this forward for waiting requests.

        They are the first rows with at most `ROW_TOKENS` tokens in total, or a single row with more.
        """
        places, losses, tokens = [], [], []
        for number, (part, rows, demand) in enumerate(zip(self._parts, chosen, demands)):
            at = np.flatnonzero(rows)
            freed = np.maximum(demand.gain, 1).ravel()[at] * part.part.store.layout.page_bytes
            places.append(np.stack([np.full(at.size, number), at], 1))
            losses.append(demand.harm.ravel()[at] / freed)
            tokens.append(part.part.counts.ravel()[at])
        order = np.argsort(np.concatenate(losses), kind="stable")
        total = np.concatenate(tokens)[order].cumsum()
        count = int(np.searchsorted(total, self._left, side="right"))
        count = max(count, int(self._left == ROW_TOKENS))
        self._left = self._left - int(total[count - 1]) if count else 0
        allowed = [np.zeros_like(rows) for rows in chosen]
        for number, at in np.concatenate(places)[order[:count]].tolist():
            allowed[number].ravel()[at] = True
        return allowed

    def _lower(self, chosen: Sequence[np.ndarray], requests: PlannedRequests) -> bool:
        """Lowers rows of each part, bool [layers, slots, heads]. Returns whether there were any."""
        for part, rows in zip(self._parts, chosen):
            if rows.any():
                part.lower(rows, requests)
        return any(rows.any() for rows in chosen)

    def reclaimable(self, slots: Collection[int]) -> np.ndarray:
        """Returns what `PartRungs.reclaimable` does, by part."""
        return np.array([part.reclaimable(slots) for part in self._parts])

    def least_need(self, slot: int, seen: int, tokens: int) -> np.ndarray:
        """Returns what `PartRungs.least_need` does, by part."""
        return np.array([part.least_need(slot, seen, tokens) for part in self._parts])

    def counts(self, slots: list[int], longest: int) -> RungCounts:
        """Returns the contents of the rows of `slots`."""
        return RungCounts(self._precise, self.lowered, longest, tuple(part.counts(slots) for part in self._parts))
