"""Work between forwards: makes room for the new tokens and refreshes the host's bounds.

The host uses upper bounds on the counts. One look at the device makes them valid for `Store.refresh_steps` more
generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..ops.backend import REFERENCE
from ..ops.tiles import Bounds
from ..pages.pool import FREE
from .budget import make_room
from .compaction import settle
from .forks import make_private
from .lowering import make_room_for_steps
from .prompt_kernels import pages_of
from .state import Store

# steps whose compaction may be pending when the host looks at the device
PENDING_STEPS = 1


def begin_forward(store: Store, tokens: int) -> None:
    """Starts a forward of `tokens` new tokens: runs a pending compaction and makes room.

    Raises:
        ValueError: pages cannot hold positions that large, or raised by `Store.look`.
        MemoryError: there is no room; the cache is unchanged.
    """
    make_private(store)
    store.check_positions(tokens)
    settle(store)
    store.forward = None
    store.lowering.begin()
    if tokens > 1 and not store.stores_by_kernel:
        store.look()
    if _generates(store, tokens):
        prepare_step(store)
    store.seen += tokens


def look_together(stores: Sequence[Store]) -> None:
    """Lets all stores that share a budget look at their device in the same step.

    When rows are lowered thus does not depend on which store held which free pages.
    """
    sharing = [store for store in stores if store.lowering.active]
    if any(store.look_due for store in sharing):
        for store in sharing:
            store.forget_bounds()


def withdraw(store: Store, tokens: int) -> None:
    """Undoes `begin_forward` for a forward whose first layer stored nothing."""
    store.seen -= tokens
    store.padding.length = min(store.padding.length, store.seen)
    store.compaction_due = False


def _generates(store: Store, tokens: int) -> bool:
    """Returns whether a forward of `tokens` new tokens is a generation step of the algorithm."""
    return tokens == 1 and store.seen > 0 and not store.recording


def prepare_step(store: Store) -> None:
    """Makes room for one generated token per request. Raises as `begin_forward` does."""
    refresh_if_due(store)
    count_step(store)


def count_step(store: Store) -> None:
    """Counts a step that was given room, and marks its compaction as pending."""
    store.steps_left -= 1
    store.compaction_due = True


def refresh_if_due(store: Store) -> None:
    """Looks at the device if the host's bounds do not cover another step. Raises as `begin_forward` does."""
    if store.look_due:
        refresh(store)


def refresh(store: Store) -> None:
    """Makes room for the next `refresh_steps` steps. Reads the device once, and once more if the pool grows."""
    lookahead = store.refresh_steps + PENDING_STEPS
    has_low = store.may_lower()
    # whether the first token of some row can leave its window before the next refresh
    rows = store.all_rows()
    leaves = (rows.is_whole() & (rows.length - rows.window_start > store.config.window - lookahead)).any()
    free = store.pool.free_list.state[FREE]
    high, low, has_low, leaves, free = store.look(store.high_count, store.low_count, has_low, leaves, free)
    has_low = has_low.astype(bool)
    store.centers_soon = bool(leaves) and store.config.center and len(store.uncentered) < store.num_layers
    tiers = (store.layout.high.capacity, store.layout.low.capacity)
    growth = (np.where(has_low & (not store.layout.selects), 0, lookahead), np.where(has_low, lookahead, 0))
    more_pages = sum(
        int((pages_of(count + more, capacity) - pages_of(count, capacity)).sum())
        for count, more, capacity in zip((high, low), growth, tiers)
    )
    bound_rows(store, high, low, lookahead)
    store.ensure_width(max(int((high + low).max()) + lookahead, store.room))
    if store.room > 0:
        store.pool.free_list.reserve(store.table.table.numel())
    store.update_limit()
    try:
        store.pool.ensure_free(more_pages, int(free))
    except MemoryError:
        if store.config.max_bytes is None:
            raise
        if store.lowering.active:
            for other in make_room_for_steps(store, lookahead):
                # its step may already have been given room
                bound_rows(other, *other.look(other.high_count, other.low_count), lookahead)
        else:
            in_empty_rows = sum(int(pages_of(more, capacity).sum()) for more, capacity in zip(growth, tiers))
            make_room(store, in_empty_rows, tuple(torch.from_numpy(more.ravel()).to(store.device) for more in growth))
        refresh(store)
    store.steps_left = store.refresh_steps


def bound_rows(store: Store, high: np.ndarray, low: np.ndarray, lookahead: int) -> None:
    """Sets upper bounds on row lengths, valid until `lookahead` more tokens have left their windows.

    Args:
        high, low: current counts, int64 [layers, batch, heads].
    """
    longest = int((high + low).max()) + lookahead + store.window_slots
    tiers = ((high, store.layout.high.capacity), (low, store.layout.low.capacity))

    def bounds(layers: slice | int) -> Bounds:
        given = [(counts[layers].ravel(), lookahead, capacity, store.device) for counts, capacity in tiers]
        return Bounds(longest, given)

    store.all_bounds = bounds(slice(None))
    store.layer_bounds = [bounds(layer) for layer in range(store.num_layers)]
    if store.ops.backend == REFERENCE:
        # now, so that the budget counts them
        for each in (store.all_bounds, *store.layer_bounds):
            _ = each.tiles
