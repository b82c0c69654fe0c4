"""Decode attention in native code."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...native.library import StepBlock, address, call, set_token, step_block, unit_stride
from ...pages import LayerRows
from ..rotation import Rotation
from ..softmax import SharedAttention, Softmax
from ..tiles import Bounds


def decode_attention(
    query: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    bounds: Bounds | None = None,
    valid: Tensor | None = None,
    scratch: None = None,
    held: SharedAttention | None = None,
) -> Tensor:
    """Attends from the newest token of every request; arguments as in the reference. The bounds are not used.

    Raises:
        ValueError: the queries do not fit the rows.
        CorruptMemoryError: a table entry is not a page, or counts do not fit the table; nothing has changed.
    """
    return attend(step_block(rows), query, softmax, valid=valid, held=held)


# filled argument blocks, by rows of a store; a record of rows lives until one of its tensors moves
_blocks: WeakKeyDictionary[LayerRows, StepBlock] = WeakKeyDictionary()


def append_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    rotation: Rotation,
    limit: float,
    bounds: Bounds | None = None,
    valid: Tensor | None = None,
    scratch: None = None,
) -> Tensor:
    """Appends a token and attends from it in one call; arguments and result as in the reference."""
    block = _blocks.get(rows)
    if block is None:
        block = _blocks[rows] = step_block(rows)
        block.key_offset = address(rows.offset)
    block.rows.pages, block.rows.page_count = rows.pool.address, rows.pool.capacity
    block.limit, block.rotate = limit, rotation.key is not None
    kept = set_token(block, key, value)
    output = attend(block, query, softmax, valid=valid)
    del kept
    return output


def attend(
    block: StepBlock,
    query: Tensor,
    softmax: Softmax,
    *,
    valid: Tensor | None = None,
    held: SharedAttention | None = None,
) -> Tensor:
    """Runs a block from `step_block`.

    Args:
        query: query states, [batch, query_heads, key_dim] or [batch, query_heads, 1, key_dim]; absorbed ones have
            key_dim + value_dim elements.

    Returns:
        Attention output in the query's shape, with value_dim as the last dimension.
    """
    form = block.format
    key_dim, value_dim = form.tier[0].key.dim, form.tier[0].value.dim
    shape = query.shape
    if shape[0] != block.batch or shape[1] % block.heads or shape[-1] not in (key_dim, key_dim + value_dim):
        raise ValueError(
            f"query {tuple(shape)} must be [{block.batch}, a multiple of {block.heads} KV heads, {key_dim}], or "
            f"{key_dim + value_dim} if it is absorbed."
        )
    block.absorbed = shape[-1] != key_dim
    query = unit_stride(query)
    output = torch.empty(*shape[:-1], value_dim, dtype=query.dtype, device=query.device)
    block.query, block.output = query.data_ptr(), output.data_ptr()
    block.query_batch, block.query_head = query.stride()[:2]
    block.group = shape[1] // block.heads
    block.scaling, block.softcap = softmax.scaling, softmax.softcap or 0.0
    block.threads = torch.get_num_threads()
    valid = None if valid is None else valid.to(torch.bool).contiguous()
    sinks = None if softmax.sinks is None else softmax.sinks.float().contiguous()
    block.valid, block.sinks = address(valid), address(sinks)
    block.received, block.fold, block.hold = None, 0, 0
    if held is not None and form.tier[0].score_bytes:
        _join(block, held)
    call("step", block)
    return output


def _join(block: StepBlock, held: SharedAttention) -> None:
    """Joins received attention over several layers; creates the buffer, [rows, tokens of a row], for the first."""
    block.fold, block.hold = held.received is not None, not held.last
    rows = block.batch * block.heads
    if held.received is None:
        # upper bound on the tokens of a row
        room = block.rows.width * max(block.format.tier[t].capacity for t in range(block.format.tiers)) + block.slots
        held.received = torch.empty(rows, room, dtype=torch.float32, device="cpu")
    block.received, block.received_stride = held.received.data_ptr(), held.received.shape[1]
