"""Pages that rows need at each precision they may have, and the choice of rows to lower for a budget (lowering.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .prompt_kernels import pages_of
from .state import PAGE_ENTRIES, Store


@dataclass(frozen=True)
class Demand:
    """Pages that rows of a store need beyond those they hold; negative numbers are given back.

    A rung is a precision of the store, counted from its stage's high one.

    Attributes:
        pages: pages that a row needs at a rung, int64 [rungs, layers, batch, heads]; unused for rungs it cannot have.
        now: rung of each row, 0 or 1, int64 [layers, batch, heads].
        may_lower: whether a row at a rung may be lowered to the next, bool [rungs - 1, layers, batch, heads]. All rows
            may, except some at the first rung and at the second-to-last.
        harm: loss from doing so, likewise.
        page_bytes: bytes that a page uses.
        capacity: tokens per page at each rung, int64 [rungs].
        layers: index of each layer in the model.
    """

    pages: np.ndarray
    now: np.ndarray
    may_lower: np.ndarray
    harm: np.ndarray
    page_bytes: int
    capacity: np.ndarray
    layers: Sequence[int]

    @classmethod
    def of_growth(cls, store: Store, held: np.ndarray, more: np.ndarray | int, final: np.ndarray) -> Demand:
        """Returns the demand of rows that hold `held` tokens outside their windows and gain `more`.

        Args:
            final: whether the row is at the low precision, bool.
        """
        capacity, now = np.array(capacities(store)), final.astype(np.int64)
        before = pages_of(held, capacity[now])
        pages = np.stack([pages_of(held + more, tokens) - before for tokens in capacity])
        moves = (len(capacity) - 1, *held.shape)
        known = store.lowering.harm
        harm = 1.0 if known is None else known[store.stage :, store.layers][:, :, None]
        may_lower = np.ones(moves, dtype=bool)
        may_lower[0] &= ~final
        if store.lowering.keeps is not None:
            may_lower[-1] &= ~store.lowering.keeps[:, None]
        harm = np.broadcast_to(harm, moves)
        return cls(pages, now, may_lower, harm, page_bytes(store), capacity, store.layers)

    @property
    def last(self) -> np.ndarray:
        """Rung of each row if all are lowered as far as they may, int64 [layers, batch, heads]."""
        # only the last move, and at the first rung the first one, may be forbidden
        end = self.may_lower.shape[0] - 1 + self.may_lower[-1]
        return np.maximum(self.now, end) if end.size else self.now

    @property
    def gain(self) -> np.ndarray:
        """Pages that each move to the next rung frees, int64 like `may_lower`; 0 where it is not allowed."""
        return np.where(self.may_lower, self.pages[:-1] - self.pages[1:], 0)

    def at(self, rungs: np.ndarray) -> np.ndarray:
        """Returns the pages that each row needs at its rung in `rungs`, int64 [layers, batch, heads]."""
        return np.take_along_axis(self.pages, rungs[None], 0)[0]

    def bytes(self, rungs: np.ndarray) -> int:
        """Returns the demand in bytes if rows are at `rungs`."""
        return int(self.at(rungs).sum()) * self.page_bytes


def capacities(store: Store) -> tuple[int, ...]:
    """Returns the tokens per page at each rung of a store (`Demand`)."""
    layouts = store.layouts[store.stage :]
    return layouts[0].high.capacity, *(layout.low.capacity for layout in layouts)


def page_bytes(store: Store) -> int:
    """Returns the bytes that a page uses, including its entries in tables."""
    return store.pool.page_bytes + PAGE_ENTRIES


def rows_to_lower(demands: Sequence[Demand], room: int) -> list[np.ndarray] | None:
    """Chooses the rows to lower until the demand of all stores fits, those with the least harm per byte first.

    A store's rows reach a rung only after all have reached the one before; a move counts as no less harmful than any
    before it.

    Args:
        demands: demand of each store.
        room: bytes that all pages together may use.

    Returns:
        Rung of each row in each store, int64 [layers, batch, heads]; None if lowering all is not enough.
    """
    chosen = [demand.now.copy() for demand in demands]
    lacking = sum(map(Demand.bytes, demands, chosen)) - room
    if lacking <= 0:
        return chosen
    moves = [_moves_in_turn(demand, number) for number, demand in enumerate(demands)]
    store, move, row, freed, keys = (np.concatenate(parts, -1) for parts in zip(*moves))
    order = np.lexsort(keys)
    enough = int(np.searchsorted(freed[order].cumsum(), lacking)) + 1
    if enough > order.size:
        return None
    for number, rungs in enumerate(chosen):
        mine = order[:enough][store[order[:enough]] == number]
        if mine.size:
            # moves that free nothing are made on the way
            reached = int(move[mine].max())
            np.maximum(rungs, reached, out=rungs)
            rungs[tuple(row[:, mine[move[mine] == reached]])] = reached + 1
    return chosen


def _moves_in_turn(demand: Demand, number: int) -> tuple[np.ndarray, ...]:
    """Returns the moves of a store's rows that free pages.

    Args:
        number: index of the store.

    Returns:
        For each move, the store's index, the rung it begins at, its row, int64 [3, moves], the bytes it frees, and its
        place among all moves as keys of `np.lexsort`, [keys, moves].
    """
    gain = demand.gain
    move, *row = np.nonzero(gain > 0)
    freed = gain[(move, *row)] * demand.page_bytes
    cost = demand.harm[(move, *row)] / freed
    layer, request, head = row
    # equal rows are taken in turn from all layers
    keys = np.stack([np.asarray(demand.layers)[layer], request, head, cost, move])
    order = np.lexsort(keys)
    cost[order] = np.maximum.accumulate(cost[order])
    return np.full(move.size, number), move, np.stack(row), freed, np.concatenate([keys, cost[None]])
