"""One layer of a compressed cache built directly, without a model: random tokens in real pages, in shuffled order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_diffkv.config import Precision
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.table import ops_for_rows
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import HIGH, LOW, FreeList, LayerRows, PageLayout, TierLayout, column
from hf_diffkv.pages.segments import Contents

CHUNK_TOKENS = 1 << 18


@dataclass
class RandomRows:
    """`batch` requests of equal length.

    Attributes:
        held: rows in the form that ops take.
        tokens: stored tokens of every row at the high and at the low level, not counting the window.
    """

    held: LayerRows
    bounds: Bounds
    tokens: tuple[int, int]

    @property
    def layout(self) -> PageLayout:
        return self.held.layout

    @property
    def bytes_read(self) -> int:
        """Bytes of the stored tokens, including scales, zero points, scores and positions, and of the window."""
        high, low, held = self.layout.high, self.layout.low, self.held
        window = int(held.length[0] - held.window_start[0])
        raw = (high.key_dim + high.value_dim) * held.dtype.itemsize + 4 * self.layout.selects
        return held.count * (self.tokens[HIGH] * high.token_bytes + self.tokens[LOW] * low.token_bytes + window * raw)

    def attend(
        self, query: Tensor, softcap: float | None = None, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Runs `decode_attention` on query [batch, query_heads, dim] with its usual scaling; it adds to the scores."""
        softmax = Softmax(query.shape[2] ** -0.5, softcap, sinks)
        return ops_for_rows(self.held).decode_attention(query, self.held, softmax, bounds=self.bounds, **options)

    def dense(self, request: int, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values float32 [tokens, dim] of one row, as stored."""
        parts, held = [], self.held
        for tier, layout in ((HIGH, self.layout.high), (LOW, self.layout.low)):
            index = torch.arange(self.tokens[tier], device=held.device)
            page = held.page_table[request, head][column(tier, index // layout.capacity, held.width)].long()
            parts.append(ops_for_rows(held).load_tokens(held.pages, layout, page, index % layout.capacity, held.dtype))
        window = int(held.length[request] - held.window_start[request])
        slot = (held.window_start[request] + torch.arange(window, device=held.device)) % held.slots
        parts.append((held.window_key[request, head, slot].float(), held.window_value[request, head, slot].float()))
        return torch.cat([key.float() for key, _ in parts]), torch.cat([value.float() for _, value in parts])

    def behind(self, bytes_before: int) -> RandomRows:
        """Copies the rows to the end of a new pool, after at least `bytes_before` bytes."""
        held, shift = self.held, bytes_before // self.layout.page_bytes + 100
        pages = held.pages.new_full((shift + held.pages.shape[0], self.layout.page_bytes), 0xFF)
        pages[shift:] = held.pages
        table = torch.where(held.page_table != 0, held.page_table + shift, 0).to(torch.int32)
        pool = SimpleNamespace(pages=pages, free_list=held.free_list)
        return replace(self, held=replace(held, pool=pool, page_table=table))


def needed_bytes(
    high: Precision,
    low: Precision,
    batch: int,
    heads: int,
    dim: int,
    tokens: tuple[int, int],
    numbers: Mapping[str, int] | None = None,
) -> int:
    """Estimates the bytes that `random_rows` allocates."""
    layout = PageLayout.build(high, low, dim, dim, 2, **(numbers or {}))
    pages = sum(_pages(count, tier) for count, tier in zip(tokens, (layout.high, layout.low)))
    return batch * heads * pages * layout.page_bytes + CHUNK_TOKENS * dim * 16


def random_rows(
    high: Precision,
    low: Precision,
    batch: int,
    heads: int,
    dim: int,
    tokens: tuple[int, int],
    context: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
    spare_pages: int = 0,
    numbers: Mapping[str, int] | None = None,
) -> RandomRows:
    """Makes rows with `tokens` at the high and the low level and a full window.

    Args:
        context: number of tokens seen; those beyond `tokens` and the window count as pruned.
        spare_pages: number of pages without an owner, after all others.
        numbers: `metadata_bits` and `position_bytes` of `PageLayout.build`, if not its defaults.
    """
    layout = PageLayout.build(high, low, dim, dim, dtype.itemsize, **(numbers or {}))
    tiers = (layout.high, layout.low)
    page_counts = [_pages(count, tier) for count, tier in zip(tokens, tiers)]
    width = sum(page_counts) + 4
    owned = batch * heads * sum(page_counts)
    pages = torch.empty(1 + owned + spare_pages, layout.page_bytes, dtype=torch.uint8, device=device)
    pages.fill_(0xFF)
    order = (1 + torch.randperm(owned, device=device)).to(torch.int32).view(batch, heads, -1)
    table = torch.zeros(batch, heads, width, dtype=torch.int32, device=device)
    table[..., : page_counts[HIGH]] = order[..., : page_counts[HIGH]]
    if page_counts[LOW]:
        table[..., width - page_counts[LOW] :] = order[..., page_counts[HIGH] :]
    count = torch.ones(batch, heads, dtype=torch.int32, device=device)
    slots = window + 1
    shape = (batch, heads, slots, dim)
    held = LayerRows(
        layout=layout,
        pool=SimpleNamespace(pages=pages, free_list=FreeList(device)),
        page_table=table,
        window_key=torch.randn(shape, device=device).to(dtype),
        window_value=torch.randn(shape, device=device).to(dtype),
        high_count=count * tokens[HIGH],
        low_count=count * tokens[LOW],
        window_score=torch.rand(shape[:3], device=device),
        window_start=torch.full((batch,), context - window, dtype=torch.int64, device=device),
        length=torch.full((batch,), context, dtype=torch.int64, device=device),
        sink_end=torch.zeros(batch, dtype=torch.int64, device=device),
        sink_slots=0,
        key_offset=torch.zeros(batch, heads, 0, device=device),
        alpha_high=torch.zeros(batch, heads, device=device),
        alpha_low=torch.zeros(batch, heads, device=device),
        invalid=torch.zeros((), dtype=torch.bool, device=device),
    )
    rows = RandomRows(held, _bounds(batch * heads, tokens, tiers, slots, device), tokens)
    for tier, tier_layout in enumerate(tiers):
        _fill(rows, tier, tier_layout, dtype)
    return rows


def _pages(count: int, tier: TierLayout) -> int:
    return -(-count // tier.capacity)


def _bounds(
    rows: int, tokens: tuple[int, int], tiers: tuple[TierLayout, TierLayout], slots: int, device: torch.device
) -> Bounds:
    import numpy as np

    given = [(np.full(rows, count), 0, tier.capacity, device) for count, tier in zip(tokens, tiers)]
    return Bounds(sum(tokens) + slots, given)


def _fill(rows: RandomRows, tier: int, layout: TierLayout, dtype: torch.dtype) -> None:
    """Quantises random tokens into every slot of one tier, repeating the same few."""
    held, count, device = rows.held, rows.tokens[tier], rows.held.device
    total = held.count * count
    chunk = min(CHUNK_TOKENS, total)
    key = torch.randn(chunk, layout.key_dim, device=device).to(dtype)
    value = torch.randn(chunk, layout.value_dim, device=device).to(dtype)
    score = torch.rand(chunk, device=device)
    table = held.page_table.view(held.count, -1)
    for start in range(0, total, max(chunk, 1)):
        index = torch.arange(start, min(start + chunk, total), device=device)
        token = index % count
        page = table[index // count, column(tier, token // layout.capacity, held.width)].long()
        part = slice(0, index.numel())
        # a low tier holds the older half of the tokens
        contents = Contents(key[part], value[part], score[part], token)
        ops_for_rows(held).store_tokens(held.pages, layout, page, token % layout.capacity, contents, dtype)
