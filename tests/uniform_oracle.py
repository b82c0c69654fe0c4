"""Expected results of `ops/store_prompt`, in plain PyTorch: many new tokens enter rows that keep every token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from chosen_ops import rotate
from torch import Tensor

from hf_diffkv.ops.quantize.reference import store_tokens
from hf_diffkv.ops.rounding.reference import LARGEST_BITS, round_keys
from hf_diffkv.ops.store_prompt.tokens import Placement, PromptTokens
from hf_diffkv.pages import HIGH, LOW, LayerRows, column
from hf_diffkv.pages.rows import compute_dtype, held_tokens, slots_of
from hf_diffkv.pages.segments import Contents


def store_prompt(
    rows: LayerRows, new: PromptTokens, placement: Placement, past: int = 0, received: Tensor | None = None
) -> None:
    """Arguments as in the op; the length of the longest row is not used."""
    assert received is None
    rows.check_tokens(new.key, new.value)
    exact = exact_tokens(rows, new, placement)
    _take_pages(rows, exact.start)
    for request, place in exact.leaves.nonzero().tolist():
        for head in range(rows.heads):
            _store(rows, exact, request, head, place, placement.feedback)
    keep_exact(rows, exact, torch.zeros_like(exact.key[..., 0], dtype=torch.float32))
    stored = (exact.start - rows.sink_end)[:, None].expand_as(rows.high_count)
    for tier, count in enumerate(rows.counts):
        count.copy_(torch.where(_is_low(rows) == (tier == LOW), stored, 0))
    rows.length.copy_(exact.length)
    rows.window_start.copy_(exact.start)


def _is_low(rows: LayerRows) -> Tensor:
    """bool [batch, heads]."""
    return rows.alpha_high > 0


def _store(rows: LayerRows, exact: Exact, request: int, head: int, place: int, feedback: Tensor | None) -> None:
    """Stores one token of `exact` in its page."""
    tier = LOW if bool(_is_low(rows)[request, head]) else HIGH
    layout = rows.tiers[tier]
    index = int(exact.token[request, place] - rows.sink_end[request])
    page = rows.page_table[request, head, column(tier, index // layout.capacity, rows.width)].long()[None]
    slot = torch.tensor([index % layout.capacity], device=rows.device)
    key, value = exact.key[request, head, None, place], exact.value[request, head, None, place]
    if feedback is not None and layout.k_bits <= LARGEST_BITS:
        key = round_keys(key, torch.tensor([request * rows.heads + head], device=rows.device), feedback, layout)
    nothing = torch.zeros(1, device=rows.device)
    store_tokens(rows.pages, layout, page, slot, Contents(key, value, nothing, nothing.int()), rows.dtype)


class Exact(NamedTuple):
    """Tokens of windows, followed by new ones.

    Attributes:
        key, value: [batch, heads, n, dim] in the form of the store.
        token: int64 [batch, n], index among a request's real tokens; -1 for none.
        stays, leaves: bool [batch, n], whether a token is in the window from now on, and whether it leaves.
        start, length: int64 [batch], start of each window afterwards, and number of tokens.
    """

    key: Tensor
    value: Tensor
    token: Tensor
    stays: Tensor
    leaves: Tensor
    start: Tensor
    length: Tensor


def exact_tokens(rows: LayerRows, new: PromptTokens, placement: Placement) -> Exact:
    """Brings new tokens into the store's form, fixes offsets, and notes tokens that cannot be stored."""
    key, value, rank, count = new.key, new.value, new.rank, new.count
    key_rotation, value_rotation = placement.rotation.key, placement.rotation.value
    if rank is None:
        rank = torch.arange(key.shape[2], dtype=torch.int32, device=key.device).expand(key.shape[0], -1)
        count = torch.full_like(rows.length, key.shape[2])
    real = rank >= 0
    for tensor, rotation in ((key, key_rotation), (value, value_rotation)):
        wide = tensor.to(compute_dtype(tensor.dtype))
        peak = wide.abs().amax((1, 3)) if rotation is None else wide.norm(dim=3).amax(1)
        rows.invalid.logical_or_((real & ~(peak <= placement.limit)).any())
    after = rows.length + count
    start = torch.maximum(rows.window_start, after - placement.window)
    held = held_tokens(rows.window_start, rows.length, rows.sink_end, rows.sink_slots, rows.slots)
    if placement.centers:
        _fix_offsets(rows, key.masked_fill(~real[:, None, :, None], 0.0), key_rotation, held >= 0, after, start)
    new_key, new_value = rotate(key, key_rotation, rows.offset), rotate(value, value_rotation)
    token = torch.cat([held, torch.where(real, rows.length[:, None] + rank, -1)], dim=1)
    stays = (token >= 0) & ((token < rows.sink_end[:, None]) | (token >= start[:, None]))
    return Exact(
        torch.cat([rows.window_key, new_key], 2),
        torch.cat([rows.window_value, new_value], 2),
        token,
        stays,
        (token >= 0) & ~stays,
        start,
        after,
    )


def keep_exact(rows: LayerRows, exact: Exact, score: Tensor) -> None:
    """Writes what stays to its window slots; score: float32 [batch, heads, n]."""
    request, place = exact.stays.nonzero(as_tuple=True)
    slots = slots_of(exact.token, rows.sink_end[:, None], rows.sink_slots, rows.slots)[request, place]
    rows.window_key[request, :, slots] = exact.key[request, :, place]
    rows.window_value[request, :, slots] = exact.value[request, :, place]
    rows.window_score[request, :, slots] = score[request, :, place]


def _fix_offsets(
    rows: LayerRows, key: Tensor, rotation: Tensor | None, there: Tensor, after: Tensor, start: Tensor
) -> None:
    dtype = rows.key_offset.dtype
    total = rotate(key.to(dtype).sum(2, keepdim=True), rotation)[:, :, 0]
    total = total + rows.window_key.to(dtype).masked_fill(~there[:, None, :, None], 0.0).sum(2)
    mean = (total + rows.length[:, None, None] * rows.key_offset) / after.clamp(min=1)[:, None, None]
    due = (rows.window_start == rows.sink_end) & (start > rows.window_start)
    fixed = torch.where(due[:, None, None], mean, rows.key_offset)
    rows.window_key.copy_(rows.window_key - (fixed - rows.key_offset)[:, :, None])
    rows.key_offset.copy_(fixed)


def _take_pages(rows: LayerRows, start: Tensor) -> None:
    low = _is_low(rows)
    capacity = torch.where(low, *(torch.tensor(tier.capacity, device=rows.device) for tier in reversed(rows.tiers)))
    have = (rows.high_count.long() + rows.low_count + capacity - 1) // capacity
    need = ((start - rows.sink_end)[:, None] + capacity - 1) // capacity
    demand = (need - have).clamp(min=0)
    row, ids = rows.free_list.take(demand.view(-1))
    first = (demand.view(-1).cumsum(0) - demand.view(-1))[row]
    page = have.view(-1)[row] + torch.arange(row.numel(), device=row.device) - first
    entry = torch.where(low.view(-1)[row], column(LOW, page, rows.width), column(HIGH, page, rows.width))
    table = rows.page_table.view(-1, rows.width)
    table[row, entry] = ids.to(table.dtype)
