"""What native code needs to know of a layer's rows."""

from __future__ import annotations

from ..native.library import StepBlock, address, format_of
from ..pages import LayerRows


def step_block(rows: LayerRows) -> StepBlock:
    """Holds while the tensors stay where they are, but for the pages, which move when their pool grows."""
    block = StepBlock(format=format_of(rows.layout, rows.dtype), batch=rows.batch, heads=rows.heads, slots=rows.slots)
    pages = rows.pages
    block.rows.pages, block.rows.page_count = address(pages), pages.shape[0]
    block.rows.table, block.rows.width = address(rows.page_table), rows.width
    block.rows.count[0], block.rows.count[1] = map(address, rows.counts)
    block.window_key, block.window_value = address(rows.window_key), address(rows.window_value)
    block.window_score, block.window_start = address(rows.window_score), address(rows.window_start)
    block.length, block.sink_end, block.sink_slots = address(rows.length), address(rows.sink_end), rows.sink_slots
    block.invalid = address(rows.invalid)
    return block
