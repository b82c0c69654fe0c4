"""Compaction in native code: one call for the rows of all layers."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...native.library import Compaction, address, call, format_of, set_rows
from ...pages import LayerRows
from ..rounding import ModelFeedback
from ..tiles import Bounds

# filled argument blocks, by rows of a store; a record of rows lives until one of its tensors moves
_blocks: WeakKeyDictionary[LayerRows, Compaction] = WeakKeyDictionary()


def compact_windows(
    rows: LayerRows,
    window: int,
    high_threshold: Tensor,
    low_threshold: Tensor | None,
    *,
    flag: Tensor,
    bounds: Bounds | None = None,
    feedback: ModelFeedback | None = None,
) -> None:
    """Compacts all rows once; arguments as in the reference. The bounds are not used.

    Raises:
        CorruptMemoryError: a table entry is not a page, or counts do not fit the table; nothing has changed.
    """
    block = _blocks.get(rows)
    if block is None:
        block = _blocks[rows] = _fixed_arguments(rows)
    # pages and free list move when their pool grows
    set_rows(block, rows)
    free_list = rows.free_list
    block.ring, block.state, block.flag = map(address, (free_list.ring, free_list.state, flag))
    block.window, block.feedback = window, None
    if feedback is not None:
        block.feedback, block.layer, block.head = map(address, (feedback.matrix, feedback.layer, feedback.head))
        block.layer_rows, block.model_heads = block.row_count // feedback.layer.numel(), feedback.matrix.shape[1]
    kept = [None if each is None else each.contiguous() for each in (high_threshold, low_threshold)]
    block.high_threshold, block.low_threshold = map(address, kept)
    block.threads = torch.get_num_threads()
    call("compact", block)


def _fixed_arguments(rows: LayerRows) -> Compaction:
    """Creates the rows' argument block, with the addresses of tensors that stay in place."""
    block = Compaction(format=format_of(rows.layout, rows.dtype), row_count=rows.count, heads=rows.heads)
    block.slots, block.sink_slots = rows.slots, rows.sink_slots
    block.key, block.value = address(rows.window_key), address(rows.window_value)
    block.score, block.length = address(rows.window_score), address(rows.length)
    block.position = address(rows.window_start)
    return block
