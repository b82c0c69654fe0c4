"""Many new tokens enter rows that keep every token high, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...memory import HIGH, FreeList, PageLayout, column
from ..quantize.reference import compute_dtype, store_tokens
from ..rotation import rotate
from ..rounding.reference import round_keys
from ..window import held_tokens, slots_of
from .rows import EnteredRows


def enter_tokens(
    rows: EnteredRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    key: Tensor,
    value: Tensor,
    *,
    rank: Tensor | None,
    count: Tensor | None,
    window: int,
    limit: float,
    key_rotation: Tensor | None,
    value_rotation: Tensor | None,
    centers: bool,
    holds: bool,
    feedback: Tensor | None,
) -> None:
    """Stores new tokens of every request behind its others; what has left the window then is quantised.

    Args:
        pages: uint8 [pages, page_bytes], whose layout has neither scores nor positions.
        free_list: holds all pages that the rows will lack.
        key, value: of the model, [batch, heads, tokens, dim].
        rank: int32 [batch, tokens], how many real tokens come before each, -1 for padding; None where all are real.
        count: int64 [batch], real tokens; None with `rank`.
        window: tokens that a window holds beside sinks.
        limit: magnitude up to which elements, as they are held, can be stored; rotated tokens by their norms.
        key_rotation, value_rotation: as `rotate` takes them.
        centers: whether offsets are fixed where a row's first token leaves its window (store/transform.py).
        holds: whether any window holds a token.
        feedback: [batch * heads, key_dim, key_dim] that quantised keys are rounded with (ops/rounding); None rounds
            each element for itself.
    """
    batch, heads, tokens, _ = key.shape
    rows.check(key, value)
    if rank is None:
        rank = torch.arange(tokens, dtype=torch.int32, device=key.device).expand(batch, -1)
        count = torch.full_like(rows.length, tokens)
    real = rank >= 0
    for tensor, rotation in ((key, key_rotation), (value, value_rotation)):
        wide = tensor.to(compute_dtype(tensor.dtype))
        peak = wide.abs().amax((1, 3)) if rotation is None else wide.norm(dim=3).amax(1)
        rows.invalid.logical_or_((real & ~(peak <= limit)).any())
    after = rows.length + count
    start = torch.maximum(rows.window_start, after - window)
    slots = rows.window_key.shape[2]
    held = held_tokens(rows.window_start, rows.length, rows.sink_end, rows.sink_slots, slots)
    if centers:
        _center(rows, key.masked_fill(~real[:, None, :, None], 0.0), key_rotation, held >= 0, after, start)
    offset = rows.key_offset if rows.key_offset.shape[2] else None
    new_key, new_value = rotate(key, key_rotation, offset), rotate(value, value_rotation)
    # the exact tokens of both sources one after the other, and which of all real ones each is, -1 for none
    all_keys, all_values = torch.cat([rows.window_key, new_key], 2), torch.cat([rows.window_value, new_value], 2)
    token = torch.cat([held, torch.where(real, rows.length[:, None] + rank, -1)], dim=1)
    end = rows.sink_end[:, None]
    stays = (token >= 0) & ((token < end) | (token >= start[:, None]))
    leaves = (token >= 0) & ~stays
    _take_pages(rows, free_list, start, layout.high.capacity)
    for request, place in leaves.nonzero().tolist():
        index = int(token[request, place] - rows.sink_end[request])
        entry = column(HIGH, index // layout.high.capacity, rows.page_table.shape[2])
        page, slot = rows.page_table[request, :, entry].long(), torch.full((heads,), index % layout.high.capacity)
        contents = (all_keys[request, :, place], all_values[request, :, place])
        if feedback is not None:
            of_heads = torch.arange(request * heads, (request + 1) * heads, device=key.device)
            contents = (round_keys(contents[0], of_heads, feedback, layout.high), contents[1])
        nothing = torch.zeros(heads, device=key.device)
        store_tokens(pages, layout.high, page, slot.to(key.device), *contents, nothing, nothing.int(), key.dtype)
    request, place = stays.nonzero(as_tuple=True)
    to_slot = slots_of(token, end, rows.sink_slots, slots)[request, place]
    rows.window_key[request, :, to_slot] = all_keys[request, :, place]
    rows.window_value[request, :, to_slot] = all_values[request, :, place]
    rows.window_score[request, :, to_slot] = 0.0
    rows.high_count.copy_((start - rows.sink_end)[:, None].expand(batch, heads))
    rows.length.copy_(after)
    rows.window_start.copy_(start)


def _center(
    rows: EnteredRows, key: Tensor, rotation: Tensor | None, there: Tensor, after: Tensor, start: Tensor
) -> None:
    dtype = rows.key_offset.dtype
    total = rotate(key.to(dtype).sum(2, keepdim=True), rotation)[:, :, 0]
    total = total + rows.window_key.to(dtype).masked_fill(~there[:, None, :, None], 0.0).sum(2)
    mean = (total + rows.length[:, None, None] * rows.key_offset) / after.clamp(min=1)[:, None, None]
    due = (rows.window_start == rows.sink_end) & (start > rows.window_start)
    fixed = torch.where(due[:, None, None], mean, rows.key_offset)
    rows.window_key.copy_(rows.window_key - (fixed - rows.key_offset)[:, :, None])
    rows.key_offset.copy_(fixed)


def _take_pages(rows: EnteredRows, free_list: FreeList, start: Tensor, capacity: int) -> None:
    have = (rows.high_count.long() + capacity - 1) // capacity
    need = ((start - rows.sink_end)[:, None] + capacity - 1) // capacity
    demand = (need - have).clamp(min=0)
    row, ids = free_list.take(demand.view(-1))
    first = (demand.view(-1).cumsum(0) - demand.view(-1))[row]
    entry = have.view(-1)[row] + torch.arange(row.numel(), device=row.device) - first
    table = rows.page_table.view(-1, rows.page_table.shape[2])
    table[row, entry] = ids.to(table.dtype)
