"""Decode attention in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.library import address, call, with_rows
from ...native.structs import Step, format_of
from ...pages import PageLayout
from .held import Held


def decode_attention(
    query: Tensor,
    pages: Tensor,
    layout: PageLayout,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    window_start: Tensor,
    length: Tensor,
    *,
    scaling: float,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    held: Held | None = None,
    sink_end: Tensor | None = None,
    sink_slots: int = 0,
) -> Tensor:
    """Arguments and result as in the reference, tiles aside.

    Raises:
        ValueError: tensors whose shapes, dtypes or strides do not fit.
        CorruptMemoryError: a table entry that is no page, or counts that do not fit the table; nothing has changed.
    """
    state = (page_table, high_count, low_count, window_key, window_value, window_score, window_start, length)
    block = layer_block(layout, *state, sink_end, sink_slots)
    block.rows.pages, block.rows.page_count = address(pages), pages.shape[0]
    if pages.dtype != torch.uint8 or pages.shape[1] != layout.page_bytes or not pages.is_contiguous():
        raise ValueError(f"pages must be contiguous uint8 [pages, {layout.page_bytes}], not {tuple(pages.shape)}.")
    return attend(block, query, scaling=scaling, valid=valid, softcap=softcap, sinks=sinks, held=held)


def layer_block(
    layout: PageLayout,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    window_start: Tensor,
    length: Tensor,
    sink_end: Tensor | None = None,
    sink_slots: int = 0,
) -> Step:
    """What a call needs to know of a layer, while its tensors stay where they are; pages are the caller's to set.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    batch, heads, width = page_table.shape
    slots = window_key.shape[2]
    rows = (batch, heads)
    for name, tensor, dtype, shape in (
        ("page_table", page_table, torch.int32, (*rows, width)),
        ("high_count", high_count, torch.int32, rows),
        ("low_count", low_count, torch.int32, rows),
        ("window_key", window_key, window_key.dtype, (*rows, slots, layout.high.key_dim)),
        ("window_value", window_value, window_key.dtype, (*rows, slots, layout.high.value_dim)),
        ("window_score", window_score, torch.float32, (*rows, slots)),
        ("window_start", window_start, torch.int64, (batch,)),
        ("length", length, torch.int64, (batch,)),
        ("sink_end", length if sink_end is None else sink_end, torch.int64, (batch,)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}.")
    block = Step(format=format_of(layout, window_key.dtype), batch=batch, heads=heads, slots=slots)
    block.rows.table, block.rows.width = address(page_table), width
    block.rows.count[0], block.rows.count[1] = address(high_count), address(low_count)
    block.window_key, block.window_value = address(window_key), address(window_value)
    block.window_score, block.window_start = address(window_score), address(window_start)
    block.length, block.sink_end, block.sink_slots = address(length), address(sink_end), sink_slots
    return block


def attend(
    block: Step,
    query: Tensor,
    *,
    scaling: float,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    held: Held | None = None,
) -> Tensor:
    """Runs a block of `layer_block` for queries [batch, query_heads, key_dim] or [batch, query_heads, 1, key_dim].

    Returns:
        As many dimensions, with value_dim as the last.
    """
    form = block.format
    key_dim, value_dim = form.tier[0].key.dim, form.tier[0].value.dim
    shape = query.shape
    if shape[0] != block.batch or shape[1] % block.heads or shape[-1] != key_dim:
        raise ValueError(
            f"query {tuple(shape)} must be [{block.batch}, a multiple of {block.heads} KV heads, {key_dim}]."
        )
    query, strides = with_rows(query)
    output = torch.empty(*shape[:-1], value_dim, dtype=query.dtype)
    block.query, block.output = query.data_ptr(), output.data_ptr()
    block.query_batch, block.query_head = strides[:2]
    block.group = shape[1] // block.heads
    block.scaling, block.softcap = scaling, softcap or 0.0
    block.threads = torch.get_num_threads()
    valid = None if valid is None else valid.to(torch.bool).contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    block.valid, block.sinks = address(valid), address(sinks)
    block.received, block.fold, block.hold = None, 0, 0
    if held is not None and form.tier[0].score_bytes:
        _join(block, held)
    call("step", block)
    return output


def _join(block: Step, held: Held) -> None:
    """Joins what tokens receive with other layers; makes the buffer, [rows, tokens of a row], at the first of them."""
    block.fold, block.hold = held.received is not None, not held.last
    rows = block.batch * block.heads
    if held.received is None:
        # no row holds more
        room = block.rows.width * max(block.format.tier[t].capacity for t in range(block.format.tiers)) + block.slots
        held.received = torch.empty(rows, room)
    block.received, block.received_stride = held.received.data_ptr(), held.received.shape[1]
