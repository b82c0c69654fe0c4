"""Decode steps of a store in native code: one call per layer, and one per round of compaction for all layers.

What a call needs to know is filled in once and used again while the store's tensors stay where they are.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from ..native.library import address
from ..native.structs import Compaction, Step
from ..ops.append.native import set_token
from ..ops.compact.native import round_block, run
from ..ops.decode_attention.native import attend, layer_block
from .state import Store

STATE = (
    *("window_key", "window_value", "window_score", "high_count", "low_count"),
    *("window_start", "length", "sink_end", "invalid", "key_offset"),
)


class NativeCalls:
    """The blocks of one store, valid while `fits` says so."""

    def __init__(self, store: Store) -> None:
        self._held = _state(store)
        self._steps: list[Step | None] = [None] * store.num_layers
        self._round: Compaction | None = None

    def fits(self, store: Store) -> bool:
        """Whether everything is where it was."""
        return all(map(is_, _state(store), self._held))

    def step(self, store: Store, layer: int) -> Step:
        """The block of one layer's step, with nothing to append."""
        block = self._steps[layer]
        if block is None:
            block = self._steps[layer] = layer_block(
                store.layout,
                store.table.table[layer],
                store.high_count[layer],
                store.low_count[layer],
                store.window_key[layer],
                store.window_value[layer],
                store.window_score[layer],
                store.window_start[layer],
                store.length[layer],
                store.sink_end[layer],
                store.sink_slots,
            )
            block.invalid, block.limit = address(store.invalid), store.value_limit
            block.rotate = store.config.rotate
            block.key_offset = address(store.key_offset[layer]) if store.config.center else None
        block.rows.pages, block.rows.page_count = store.pool.address, store.pool.capacity
        block.key = None
        return block

    def round(self, store: Store) -> Compaction:
        """The block of a round of compaction."""
        if self._round is None:
            block = self._round = round_block(
                store.layout,
                store.pool.free_list,
                store.table.table,
                store.high_count,
                store.low_count,
                store.window_key,
                store.window_value,
                store.window_score,
                store.window_start,
                store.length,
                store.flag,
            )
            block.row_count = store.num_layers * store.rows_per_layer
            block.heads, block.slots, block.window = store.num_heads, store.window_slots, store.config.window
            block.sink_slots = store.sink_slots
            block.advance = block.position
        return self._round


def _state(store: Store) -> tuple:
    held = store.__dict__
    return (store.table.table, store.pool.free_list.ring, store.flag, *[held[name] for name in STATE])


def calls(store: Store) -> NativeCalls:
    """The store's blocks, made anew where its tensors have moved."""
    if store.native_calls is None or not store.native_calls.fits(store):
        store.native_calls = NativeCalls(store)
    return store.native_calls


def append_and_attend(store: Store, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Appends a token and attends from it, in one call; arguments and result as in `attend_token`."""
    block = calls(store).step(store, layer)
    kept = set_token(block, key, value)
    output = attend(block, query, **options)
    del kept
    return output


def compact(store: Store, high_threshold: Tensor | None, low_threshold: Tensor | None) -> None:
    """One round of compaction; thresholds float32, one for each row, or None where the store selects nothing."""
    block = calls(store).round(store)
    run(block, store.pool.address, store.pool.capacity, high_threshold, low_threshold)
