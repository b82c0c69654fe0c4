"""What stands before the new tokens of every request and KV head: stored tokens, then exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...pages import HIGH, LOW, LayerRows
from ...pages.window import held_tokens
from ..compact import stored_tokens
from ..quantize import compute_dtype, load_tokens


@dataclass(frozen=True, eq=False)
class EarlierTokens:
    """Tokens that are all before the new ones and attended by every one of them.

    Attributes:
        rows: what is stored; None where nothing is.
        stored: tokens of its longest row, window included. A row's tokens rank high, low, window, each in stored order.
        key, value: [batch, kv_heads, tokens, dim], exact tokens behind what is stored; None without any.
        valid: bool [batch, kv_heads, tokens], which of them exist.

    Raises:
        ValueError: only some of the last three are given.
    """

    rows: LayerRows | None = None
    stored: int = 0
    key: Tensor | None = None
    value: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        given = [part is not None for part in (self.key, self.value, self.valid)]
        if any(given) and not all(given):
            raise ValueError("earlier tokens need a key, a value and valid together.")

    @property
    def exact(self) -> int:
        """Tokens of `key`."""
        return 0 if self.key is None else self.key.shape[2]

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.stored + self.exact

    def dense(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys, values [batch, kv_heads, tokens, dim] and which there are, bool [batch, kv_heads, tokens]; None without
        any. Those that are stored come by rank, in float32 (float64 models: float64), zeros behind a row's last."""
        parts = [_decoded(self.rows, self.stored)] if self.stored else []
        if self.exact:
            parts.append((self.key, self.value, self.valid))
        if len(parts) < 2:
            return parts[0] if parts else None
        dtype = torch.promote_types(parts[0][0].dtype, self.key.dtype)
        key, value = (torch.cat([part[i].to(dtype) for part in parts], dim=2) for i in (0, 1))
        return key, value, torch.cat([part[2] for part in parts], dim=2)


NOTHING = EarlierTokens()


def _decoded(rows: LayerRows, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads = rows.batch, rows.heads
    device, dtype = rows.device, rows.dtype
    tiers = rows.tiers
    shape = (rows.count, longest)
    key = torch.zeros(*shape, tiers[HIGH].key_dim, dtype=compute_dtype(dtype), device=device)
    value = torch.zeros(*shape, tiers[HIGH].value_dim, dtype=compute_dtype(dtype), device=device)
    before = torch.zeros(rows.count, dtype=torch.int64, device=device)
    for tier in (HIGH, LOW):
        count = rows.counts[tier].view(-1).long()
        tokens = stored_tokens(rows, tier)
        rank = before[tokens.row] + tokens.index
        parts = load_tokens(rows.pages, tiers[tier], tokens.page, tokens.slot, dtype)
        key[tokens.row, rank], value[tokens.row, rank] = (part.to(key.dtype) for part in parts)
        before = before + count
    place = held_tokens(rows.window_start, rows.length, rows.sink_end, rows.sink_slots, rows.slots)
    held = (place >= 0).sum(1).repeat_interleave(kv_heads)
    # places of the tokens in their order, the empty ones last
    order = torch.where(place < 0, torch.iinfo(place.dtype).max, place).argsort(1)
    order = order.repeat_interleave(kv_heads, dim=0)
    row, index = (torch.arange(rows.slots, device=device) < held[:, None]).nonzero(as_tuple=True)
    slot, rank = order[row, index], before[row] + index
    key[row, rank] = rows.window_key.flatten(0, 1)[row, slot].to(key.dtype)
    value[row, rank] = rows.window_value.flatten(0, 1)[row, slot].to(value.dtype)
    valid = torch.arange(longest, device=device) < (before + held)[:, None]
    return tuple(part.unflatten(0, (batch, kv_heads)) for part in (key, value, valid))
