"""What is stored before new tokens come: pages and window of every request and KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...pages import HIGH, LOW, PageLayout
from ...pages.window import held_tokens
from ..compact import stored_tokens
from ..quantize import compute_dtype, load_tokens


@dataclass(frozen=True)
class StoredPast:
    """Compressed tokens, all of them before and attended by every new one.

    Attributes:
        pages: uint8 [pages, page_bytes]. page_table: int32 [batch, kv_heads, width].
        high_count, low_count: int32 [batch, kv_heads], tokens stored at each level.
        window_key, window_value: [batch, kv_heads, slots, dim] in the model's dtype; where tokens stand is said in
            pages/window.py.
        window_start, length: int64 [batch], the window holds the tokens [window_start, length), and the sinks.
        tokens: of the longest row, window included. A row's tokens rank high, low, window, each in stored order.
        sink_end, sink_slots: int64 [batch], the tokens below are sinks, and slots for them; None without sinks.
    """

    pages: Tensor
    layout: PageLayout
    page_table: Tensor
    high_count: Tensor
    low_count: Tensor
    window_key: Tensor
    window_value: Tensor
    window_start: Tensor
    length: Tensor
    tokens: int
    sink_end: Tensor | None = None
    sink_slots: int = 0

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [batch, kv_heads, tokens, dim] by rank, float32 (float64 models: float64), zeros behind a row's
        last; and which there are, bool [batch, kv_heads, tokens]."""
        batch, kv_heads = self.page_table.shape[:2]
        device, dtype = self.pages.device, self.window_key.dtype
        rows = batch * kv_heads
        table = self.page_table.view(rows, -1)
        tiers = (self.layout.high, self.layout.low)
        shape = (rows, self.tokens)
        key = torch.zeros(*shape, tiers[HIGH].key_dim, dtype=compute_dtype(dtype), device=device)
        value = torch.zeros(*shape, tiers[HIGH].value_dim, dtype=compute_dtype(dtype), device=device)
        before = torch.zeros(rows, dtype=torch.int64, device=device)
        for tier, counts in ((HIGH, self.high_count), (LOW, self.low_count)):
            count = counts.reshape(rows).long()
            tokens = stored_tokens(table, count, tier, tiers[tier])
            rank = before[tokens.row] + tokens.index
            parts = load_tokens(self.pages, tiers[tier], tokens.page, tokens.slot, dtype)
            key[tokens.row, rank], value[tokens.row, rank] = (part.to(key.dtype) for part in parts)
            before = before + count
        slots = self.window_key.shape[2]
        place = held_tokens(self.window_start, self.length, self.sink_end, self.sink_slots, slots)
        held = (place >= 0).sum(1).repeat_interleave(kv_heads)
        # places of the tokens in their order, the empty ones last
        order = torch.where(place < 0, torch.iinfo(place.dtype).max, place).argsort(1)
        order = order.repeat_interleave(kv_heads, dim=0)
        row, index = (torch.arange(slots, device=device) < held[:, None]).nonzero(as_tuple=True)
        slot, rank = order[row, index], before[row] + index
        key[row, rank] = self.window_key.flatten(0, 1)[row, slot].to(key.dtype)
        value[row, rank] = self.window_value.flatten(0, 1)[row, slot].to(value.dtype)
        valid = torch.arange(self.tokens, device=device) < (before + held)[:, None]
        return tuple(part.unflatten(0, (batch, kv_heads)) for part in (key, value, valid))


def all_before(past: StoredPast | None, *dense: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys, values and which there are of everything before the new tokens; None if there is nothing."""
    parts = [] if past is None or past.tokens == 0 else [past.dense()]
    if dense[0] is not None and dense[0].shape[2]:
        parts.append(dense)
    if len(parts) < 2:
        return parts[0] if parts else None
    dtype = torch.promote_types(parts[0][0].dtype, dense[0].dtype)
    key, value = (torch.cat([part[i].to(dtype) for part in parts], dim=2) for i in (0, 1))
    return key, value, torch.cat([part[2] for part in parts], dim=2)
