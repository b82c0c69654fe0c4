"""Compaction in native code: one call for the rows of all layers."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...native.library import Compaction, address, call, format_of, set_rows
from ...pages import LayerRows
from ..rounding import ModelFeedback
from ..tiles import Bounds


def compact_step(
    rows: LayerRows,
    leaving: Tensor,
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
    block, leaving = round_block(rows, flag), leaving.contiguous()
    block.leaving = address(leaving)
    set_feedback(block, feedback)
    run(block, high_threshold, low_threshold)


# filled argument blocks of the rows of stores; records of rows live until one of their tensors moves
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
    """Compacts the rows of overfull windows; arguments as in the reference. The bounds are not used."""
    block, pool = _blocks.get(rows), rows.pool
    if block is None:
        block = _blocks[rows] = round_block(rows, flag)
    block.window = window
    block.rows.pages, block.rows.page_count = pool.address, pool.capacity
    block.ring, block.state, block.flag = map(address, (pool.free_list.ring, pool.free_list.state, flag))
    set_feedback(block, feedback)
    run(block, high_threshold, low_threshold)


def round_block(rows: LayerRows, flag: Tensor) -> Compaction:
    """Creates the argument block for compacting all rows.

    The block stays valid while the tensors stay in place. The addresses of pages and free list, which move when their
    pool grows, must be updated.
    """
    block = Compaction(format=format_of(rows.layout, rows.dtype), row_count=rows.count, heads=rows.heads)
    block.slots, block.sink_slots = rows.slots, rows.sink_slots
    set_rows(block, rows)
    block.key, block.value = address(rows.window_key), address(rows.window_value)
    block.score, block.length = address(rows.window_score), address(rows.length)
    block.position = block.advance = address(rows.window_start)
    free_list = rows.free_list
    block.ring, block.state, block.flag = address(free_list.ring), address(free_list.state), address(flag)
    return block


def set_feedback(block: Compaction, feedback: ModelFeedback | None) -> None:
    """Sets the feedback by which `block` rounds keys; its tensors must be kept alive."""
    if feedback is None:
        block.feedback = None
        return
    block.feedback, block.layer, block.head = map(address, (feedback.matrix, feedback.layer, feedback.head))
    block.layer_rows, block.model_heads = block.row_count // feedback.layer.numel(), feedback.matrix.shape[1]


def run(block: Compaction, high_threshold: Tensor, low_threshold: Tensor | None) -> None:
    """Runs a block from `round_block`; thresholds as in `compact_step`."""
    thresholds = [None if each is None else each.contiguous() for each in (high_threshold, low_threshold)]
    block.high_threshold, block.low_threshold = map(address, thresholds)
    block.threads = torch.get_num_threads()
    call("compact", block)
