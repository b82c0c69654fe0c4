"""Decode attention over pages and window in plain PyTorch: split along the sequence, merged at the end.

Codes are converted to floats but never scaled one by one: with key = scale * code + zero,
    logit = scale * (query . code) + zero * sum(query),   output = sum(p * scale * code) + sum(p * zero).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory import HIGH, LOW, NULL_PAGE, PageLayout, TierLayout, column
from ..quantize import compute_dtype
from ..segments import Segments, segments
from ..tiles import Tiles

CHUNK_ELEMENTS = 1 << 19
# exp(-40) of the largest weight is below rounding; products of smaller ones would be subnormal numbers, which are slow
LOWEST_EXPONENT = -40.0


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
    scoring = valid.repeat_interleave(kv_heads)
    # padding may hold anything, and zero times infinity is not zero
    scaled = torch.where(scoring[:, None, None], scaled, 0.0)
    window = _window_logits(scaled, window_key, window_start, length, softcap)
    merged = _window_partials(window, window_value, sinks, group)
    pieces = []
    for tier, tier_layout, counts in ((HIGH, layout.high, high_count), (LOW, layout.low, low_count)):
        piece = _Tier(tier, tier_layout, tiles[tier], counts.view(-1), tables, pages, query.dtype)
        if piece.tiles.row.numel():
            piece.attend(scaled, merged, softcap)
            pieces.append(piece)
    total = torch.where(merged.total == 0, 1.0, merged.total)
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
        self,
        tier: int,
        layout: TierLayout,
        tiles: Tiles,
        counts: Tensor,
        tables: Tensor,
        pages: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.layout, self.tiles, self.dtype, self.pages = layout, tiles, dtype, pages
        # few tiles are done in one go, masked throughout: fewer operations count for more than work saved
        tokens = tiles.pages * layout.capacity
        self.step = max(1, CHUNK_ELEMENTS // (tokens * layout.key_dim))
        self.full = tiles.full if tiles.row.numel() > self.step else 0
        width = tables.shape[-1]
        page = tiles.first[:, None] + torch.arange(tiles.pages, device=tables.device)
        entry = tables[tiles.row[:, None], column(tier, page.clamp(max=width - 1), width)]
        self.ids = torch.where(page * layout.capacity < counts[tiles.row, None], entry, NULL_PAGE).long()
        token = page[self.full :, :, None] * layout.capacity + torch.arange(layout.capacity, device=tables.device)
        self.absent = (token >= counts[tiles.row[self.full :], None, None]).flatten(1)
        self.keys = _parts(layout.key_dim, layout.k_bits, layout.k_groups)
        self.values = _parts(layout.value_dim, layout.v_bits, layout.v_groups)

    def attend(self, query: Tensor, merged: _Partials, softcap: float | None) -> None:
        """Adds this tier's tokens to `merged`; keeps the softmax weights for `add_scores`."""
        layout, tiles = self.layout, self.tiles
        count, tokens = self.ids.shape[0], tiles.pages * layout.capacity
        group = query.shape[1]
        query = query[tiles.row]
        shape = (count, group)
        self.weights = query.new_empty(*shape, tokens)
        peak, total = query.new_empty(shape), query.new_empty(shape)
        output = query.new_empty(*shape, layout.value_dim)
        for start, stop in _chunks(self.full, count, self.step):
            chunk = slice(start, stop)
            view = segments(self.pages.index_select(0, self.ids[chunk].flatten()), layout)
            weights = self.weights[chunk]
            self._logits(view, query[chunk], weights)
            if softcap is not None:
                weights.div_(softcap).tanh_().mul_(softcap)
            absent = self.absent[start - self.full : stop - self.full] if start >= self.full else None
            if absent is not None:
                weights.masked_fill_(absent[:, None], -torch.inf)
            highest = weights.amax(-1)
            peak[chunk] = highest if absent is None else torch.where(highest == -torch.inf, 0.0, highest)
            weights.sub_(peak[chunk, :, None]).clamp_(min=LOWEST_EXPONENT).exp_()
            if absent is not None:
                weights.masked_fill_(absent[:, None], 0.0)
            total[chunk] = weights.sum(-1)
            self._output(view, weights, absent, output[chunk])
        self._merge(merged, peak, total, output)

    def _merge(self, merged: _Partials, peak: Tensor, total: Tensor, output: Tensor) -> None:
        row = self.tiles.row
        self.peak = peak
        highest = merged.peak.scatter_reduce(0, row[:, None].expand_as(peak), peak, "amax")
        before = torch.exp(merged.peak - highest)
        share = torch.exp(peak - highest[row])
        merged.total = (merged.total * before).index_add_(0, row, total * share)
        merged.output = (merged.output * before[..., None]).index_add_(0, row, output * share[..., None])
        merged.peak = highest

    def _logits(self, view: Segments, query: Tensor, out: Tensor) -> None:
        """Logits of a chunk of tiles, [tiles, group, tokens], into `out`."""
        layout, count = self.layout, query.shape[0]
        if layout.k_bits == 16:
            key = view.key.contiguous().view(self.dtype).to(query.dtype).view(count, -1, layout.key_dim)
            torch.bmm(query, key.mT, out=out)
            return
        planes = _planes(view.key, layout.k_bits, query.dtype, count)
        scale, zero = view.key_metadata.to(query.dtype).view(count, -1, layout.k_groups, 2).unbind(-1)
        for index, parts in enumerate(self.keys):
            term = out if index == 0 else torch.empty_like(out)
            for part_index, part in enumerate(parts):
                codes = planes[part.plane][..., part.columns].mT
                if part_index == 0:
                    torch.bmm(query[..., part.dims], codes, out=term)
                else:
                    term.baddbmm_(query[..., part.dims], codes)
            total = sum(query[..., part.dims].sum(-1) for part in parts)
            term.mul_(scale[:, None, :, index]).addcmul_(total[..., None], zero[:, None, :, index])
            if index:
                out.add_(term)

    def _output(self, view: Segments, weights: Tensor, absent: Tensor | None, out: Tensor) -> None:
        """Weighted values of a chunk of tiles, [tiles, group, value_dim], into `out`."""
        layout, count = self.layout, weights.shape[0]
        if layout.v_bits == 16:
            value = view.value.contiguous().view(self.dtype).to(weights.dtype).view(count, -1, layout.value_dim)
            out.copy_(torch.bmm(weights, value if absent is None else value.masked_fill(absent[..., None], 0.0)))
            return
        planes = _planes(view.value, layout.v_bits, weights.dtype, count)
        metadata = view.value_metadata.to(weights.dtype).view(count, -1, layout.v_groups, 2)
        if absent is not None:
            metadata.masked_fill_(absent[..., None, None], 0.0)
        scale, zero = metadata.unbind(-1)
        offsets = torch.bmm(weights, zero)
        for index, parts in enumerate(self.values):
            scaled = weights * scale[:, None, :, index]
            for part in parts:
                values = torch.bmm(scaled, planes[part.plane][..., part.columns])
                out[..., part.dims] = values.add_(offsets[..., index, None])

    def add_scores(self, log_total: Tensor, scoring: Tensor) -> None:
        """Adds each token's largest probability within the group to its sum."""
        row = self.tiles.row
        share = self.peak - log_total[row]
        share = torch.where(scoring[row, None] & (share > LOWEST_EXPONENT), torch.exp(share), 0.0)
        received = self.weights.mul_(share[..., None]).amax(1).float()
        score = segments(self.pages, self.layout).score
        score[self.ids] = score[self.ids] + received.view(*self.ids.shape, -1)


@dataclass(frozen=True)
class _Part:
    """Consecutive elements of a head that stand in one bit plane and one quantisation group."""

    plane: int
    columns: slice
    dims: slice


def _parts(dim: int, bits: int, groups: int) -> list[list[_Part]]:
    """The parts of every group."""
    width = dim * bits // 8 if bits < 8 else dim
    size = dim // groups
    result = []
    for group in range(groups):
        parts, start = [], group * size
        while start < (group + 1) * size:
            plane = start // width
            stop = min((plane + 1) * width, (group + 1) * size)
            parts.append(_Part(plane, slice(start - plane * width, stop - plane * width), slice(start, stop)))
            start = stop
        result.append(parts)
    return result


def _planes(packed: Tensor, bits: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Bit planes of packed rows uint8 [pages, N, row] as floats [count, tokens, row]."""
    row = packed.shape[-1]
    flat = packed.flatten(1)
    planes = 8 // bits
    mask = 2**bits - 1
    result = []
    for index in range(planes):
        plane = flat >> (bits * index) if index else flat
        plane = plane & mask if index < planes - 1 else plane
        result.append(plane.to(dtype, memory_format=torch.contiguous_format).view(count, -1, row))
    return result


def _chunks(full: int, count: int, step: int) -> list[tuple[int, int]]:
    """Ranges of at most `step` tiles that never mix full tiles and others."""
    ranges = []
    for first, last in ((0, full), (full, count)):
        ranges += [(start, min(start + step, last)) for start in range(first, last, step)]
    return ranges
