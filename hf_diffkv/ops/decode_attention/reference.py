"""Decode attention over pages and window in plain PyTorch: split along the sequence, merged at the end.

Codes are converted to floats but never scaled one by one: with key = scale * code + zero,
    logit = scale * (query . code) + zero * sum(query),   output = sum(p * scale * code) + sum(p * zero).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory import HIGH, LOW, PageLayout, TierLayout, column
from ..quantize import compute_dtype
from ..segments import Segments, segments
from ..tiles import Tiles

CHUNK_ELEMENTS = 1 << 19


@dataclass
class _Partials:
    """Split softmax state of each row: peak and total [rows, group], weighted values [rows, group, value_dim]."""

    peak: Tensor
    total: Tensor
    output: Tensor


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
    tiles: tuple[Tiles, Tiles],
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the newest token of every request, which already stands in the window.

    Args:
        query: [batch, query_heads, key_dim].
        pages: uint8 [pages, page_bytes]; the score segments of attended tokens are updated.
        page_table: int32 [batch, kv_heads, width].
        high_count, low_count: int32 [batch, kv_heads], tokens stored at each level.
        window_key, window_value: [batch, kv_heads, slots, dim]; token i stands in slot i % slots.
        window_score: float32 [batch, kv_heads, slots], updated.
        window_start, length: int64 [batch], the window holds the tokens [window_start, length).
        tiles: pieces that cover all high and all low pages of the batch * kv_heads rows.
        valid: bool [batch]; where False the newest token is padding: zeros are returned and nothing scores.
        scaling, softcap, sinks: as in `prefill_attention`.

    Returns:
        [batch, query_heads, value_dim] in the query's dtype. To each attended token but the newest its sum gains the
        maximum over the group of the probabilities.
    """
    batch, kv_heads = page_table.shape[:2]
    dtype = compute_dtype(query.dtype)
    group = query.shape[1] // kv_heads
    rows = batch * kv_heads
    scaled = (query.to(dtype) * scaling).view(rows, group, -1)
    tables = page_table.view(rows, -1)
    if valid is None:
        valid = length > 0
    window = _window_logits(scaled, window_key, window_start, length, softcap)
    merged = _window_partials(window, window_value, sinks, group)
    pieces = []
    for tier, tier_layout, counts in ((HIGH, layout.high, high_count), (LOW, layout.low, low_count)):
        piece = _Tier(tier, tier_layout, tiles[tier], counts.view(-1), tables, pages, query.dtype)
        if piece.tiles.row.numel():
            piece.attend(scaled, merged, softcap)
            pieces.append(piece)
    total = torch.where(merged.total == 0, 1.0, merged.total)
    scoring = valid.repeat_interleave(kv_heads)
    output = torch.where(scoring[:, None, None], merged.output / total[..., None], 0.0)
    log_total = merged.peak + torch.log(total)
    for piece in pieces:
        piece.add_scores(log_total, scoring)
    _add_window_scores(window, log_total, window_score, length, scoring)
    return output.view(batch, kv_heads * group, -1).to(query.dtype)


def _window_logits(query: Tensor, key: Tensor, start: Tensor, length: Tensor, softcap: float | None) -> Tensor:
    """Logits [rows, group, slots] of the window, -inf in empty slots."""
    batch, kv_heads, slots = key.shape[:3]
    logits = torch.bmm(query, key.reshape(batch * kv_heads, slots, -1).to(query.dtype).mT)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    # slot s holds the newest token i < length with i % slots == s
    slot = torch.arange(slots, device=key.device)
    token = length[:, None] - 1 - (length[:, None] - 1 - slot) % slots
    present = (token >= start[:, None]).repeat_interleave(kv_heads, dim=0)
    return logits.masked_fill(~present[:, None], -torch.inf)


def _window_partials(logits: Tensor, value: Tensor, sinks: Tensor | None, group: int) -> _Partials:
    batch, kv_heads, slots = value.shape[:3]
    peak = logits.amax(-1)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, kv_heads, group).expand(batch, -1, -1).reshape(-1, group)
        peak = torch.maximum(peak, sink)
    safe = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(logits - safe[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sink - safe)
    value = value.reshape(batch * kv_heads, slots, -1).to(logits.dtype)
    empty = (weights == 0).all(1)[..., None]
    return _Partials(safe, total, torch.bmm(weights, value.masked_fill(empty, 0.0)))


def _add_window_scores(logits: Tensor, log_total: Tensor, score: Tensor, length: Tensor, scoring: Tensor) -> None:
    batch, kv_heads, slots = score.shape
    received = torch.exp(logits - log_total[..., None]).amax(1)
    newest = ((length - 1) % slots).repeat_interleave(kv_heads)[:, None]
    received.scatter_(1, newest, 0.0)
    score += torch.where(scoring[:, None], received, 0.0).view(batch, kv_heads, slots).float()


class _Tier:
    """One tier's share of the attention."""

    def __init__(
        self, tier: int, layout: TierLayout, tiles: Tiles, counts: Tensor, tables: Tensor, pages: Tensor, dtype
    ) -> None:
        self.layout, self.tiles, self.dtype = layout, tiles, dtype
        self.pages = pages
        width = tables.shape[-1]
        page = tiles.first[:, None] + torch.arange(tiles.pages, device=tables.device)
        exists = page * layout.capacity < counts[tiles.row, None]
        entry = tables[tiles.row[:, None], column(tier, page.clamp(max=width - 1), width)]
        self.ids = torch.where(exists, entry, 0).long()
        token = page[..., None] * layout.capacity + torch.arange(layout.capacity, device=tables.device)
        self.present = (token < counts[tiles.row, None, None]).flatten(1)
        self.logits: list[Tensor] = []

    def attend(self, query: Tensor, merged: _Partials, softcap: float | None) -> None:
        """Adds this tier's tokens to `merged`; keeps the logits for `add_scores`."""
        tokens = self.present.shape[1]
        step = max(1, CHUNK_ELEMENTS // (tokens * self.layout.key_dim))
        partials = []
        for start in range(0, self.ids.shape[0], step):
            chunk = slice(start, start + step)
            ids = self.ids[chunk]
            view = segments(self.pages.index_select(0, ids.flatten()), self.layout)
            logits = self._chunk_logits(view, query[self.tiles.row[chunk]], ids.shape[0])
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits.masked_fill_(~self.present[chunk, None], -torch.inf)
            self.logits.append(logits)
            peak = logits.amax(-1)
            peak = torch.where(peak == -torch.inf, 0.0, peak)
            weights = torch.exp(logits - peak[..., None])
            partials.append((peak, weights.sum(-1), self._chunk_output(view, weights, self.present[chunk])))
        peak, total, output = (torch.cat(parts) for parts in zip(*partials))
        self._merge(merged, peak, total, output)

    def _merge(self, merged: _Partials, peak: Tensor, total: Tensor, output: Tensor) -> None:
        row = self.tiles.row
        highest = merged.peak.scatter_reduce(0, row[:, None].expand_as(peak), peak, "amax")
        before = torch.exp(merged.peak - highest)
        share = torch.exp(peak - highest[row])
        merged.total = (merged.total * before).index_add_(0, row, total * share)
        merged.output = (merged.output * before[..., None]).index_add_(0, row, output * share[..., None])
        merged.peak = highest

    def _chunk_logits(self, view: Segments, query: Tensor, count: int) -> Tensor:
        layout = self.layout
        if layout.k_bits == 16:
            key = view.key.contiguous().view(self.dtype).to(query.dtype).view(count, -1, layout.key_dim)
            return torch.bmm(query, key.mT)
        codes = _codes(view.key, layout.k_bits, query.dtype).view(count, -1, layout.key_dim)
        scale, zero = view.key_metadata.to(query.dtype).reshape(count, -1, layout.k_groups, 2).unbind(-1)
        logits = None
        for index, (part, part_codes) in enumerate(
            zip(query.chunk(layout.k_groups, dim=-1), codes.chunk(layout.k_groups, dim=-1))
        ):
            term = torch.bmm(part, part_codes.mT).mul_(scale[:, None, :, index])
            term.addcmul_(part.sum(-1, keepdim=True), zero[:, None, :, index])
            logits = term if logits is None else logits.add_(term)
        return logits

    def _chunk_output(self, view: Segments, weights: Tensor, present: Tensor) -> Tensor:
        layout = self.layout
        count = weights.shape[0]
        if layout.v_bits == 16:
            value = view.value.contiguous().view(self.dtype).to(weights.dtype).view(count, -1, layout.value_dim)
            return torch.bmm(weights, value.masked_fill(~present[..., None], 0.0))
        codes = _codes(view.value, layout.v_bits, weights.dtype).view(count, -1, layout.value_dim)
        metadata = view.value_metadata.to(weights.dtype).reshape(count, -1, layout.v_groups, 2)
        scale, zero = torch.where(present[..., None, None], metadata, 0.0).unbind(-1)
        parts = []
        for index, part_codes in enumerate(codes.chunk(layout.v_groups, dim=-1)):
            part = torch.bmm(weights * scale[:, None, :, index], part_codes)
            parts.append(part + torch.bmm(weights, zero[:, :, index, None]))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def add_scores(self, log_total: Tensor, scoring: Tensor) -> None:
        """Adds each token's largest probability within the group to its sum."""
        row = self.tiles.row
        logits = torch.cat(self.logits)
        received = torch.exp(logits - log_total[row, :, None]).amax(1)
        received = torch.where(scoring[row, None], received, 0.0).float().view(*self.ids.shape, -1)
        score = segments(self.pages, self.layout).score
        score[self.ids] = score[self.ids] + received


def _codes(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Packed rows uint8 [..., row] as floats [..., dim]."""
    planes = 8 // bits
    if planes == 1:
        return packed.to(dtype)
    width = packed.shape[-1]
    out = torch.empty(*packed.shape[:-1], width * planes, dtype=dtype, device=packed.device)
    mask = 2**bits - 1
    for index in range(planes):
        plane = packed >> (bits * index) if index else packed
        out[..., index * width : (index + 1) * width] = plane & mask if index < planes - 1 else plane
    return out
