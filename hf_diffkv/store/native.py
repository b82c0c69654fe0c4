"""Decode steps of a store in native code: one call per layer, and one call per compaction for all layers.

The argument blocks are filled in once and reused while the store's tensors stay in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..native.library import Compaction, StepBlock, address, step_block
from ..ops.append.native import set_token
from ..ops.compact.native import round_block, run, set_feedback
from ..ops.decode_attention.native import attend
from ..ops.rounding import ModelFeedback
from ..ops.softmax import Softmax
from ..pages import KeptRows
from .state import Store


class NativeCalls:
    """Argument blocks of one store, valid while its rows are `kept`."""

    def __init__(self, store: Store, kept: KeptRows) -> None:
        self.kept = kept
        self._steps: list[StepBlock | None] = [None] * store.num_layers
        self._round: Compaction | None = None

    def step(self, store: Store, layer: int) -> StepBlock:
        """Returns the block of one layer's step, without a token to append."""
        block = self._steps[layer]
        if block is None:
            rows = self.kept.layer(layer)
            block = self._steps[layer] = step_block(rows)
            block.limit, block.rotate, block.key_offset = store.value_limit, store.config.rotate, address(rows.offset)
        block.rows.pages, block.rows.page_count = store.pool.address, store.pool.capacity
        block.key = None
        return block

    def round(self, store: Store) -> Compaction:
        """Returns the block of one compaction."""
        if self._round is None:
            self._round = round_block(self.kept.all(), store.flag)
            self._round.window = store.config.window
        block, pool = self._round, store.pool
        block.rows.pages, block.rows.page_count = pool.address, pool.capacity
        block.ring, block.state, block.flag = map(address, (pool.free_list.ring, pool.free_list.state, store.flag))
        return block


def calls(store: Store) -> NativeCalls:
    """Returns the store's blocks, rebuilt if its tensors have moved."""
    kept = store.kept_rows()
    if store.native_calls is None or store.native_calls.kept is not kept:
        store.native_calls = NativeCalls(store, kept)
    return store.native_calls


def append_and_attend(
    store: Store, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, **options: Any
) -> Tensor:
    """Appends a token and attends from it in one call; arguments and result as in `attend_token`."""
    block = calls(store).step(store, layer)
    kept = set_token(block, key, value)
    output = attend(block, query, softmax, **options)
    del kept
    return output


def compact(store: Store, high_threshold: Tensor, low_threshold: Tensor | None, feedback: ModelFeedback | None) -> None:
    """Compacts all rows once; thresholds (one per row) and feedback as in `ops.compact.compact_step`."""
    block = calls(store).round(store)
    set_feedback(block, feedback)
    run(block, high_threshold, low_threshold)
