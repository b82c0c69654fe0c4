"""Rewrites rows after a forward of several tokens, when many tokens may be removed, demoted or added at once.

Keys and values of added tokens stay in place until they are stored, so that each is copied only once, and only a few
at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from ...pages import HIGH, LOW, NULL_PAGE, LayerRows, TierLayout, column
from ...pages.segments import Contents, segments
from ..quantize.reference import move_tokens
from ..rounding import LARGEST_BITS
from ..table import Ops

# tokens moved through a copy at a time
MOVE_TOKENS = 1 << 14
# tokens copied at a time, on CPUs and on other devices, where each part costs launches
READ_TOKENS, READ_TOKENS_BY_KERNELS = 1 << 12, 1 << 16


class TokenSource(Protocol):
    """A source of keys and values."""

    def __len__(self) -> int:
        """Returns the number of tokens."""

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys [n, key_dim] and values [n, value_dim] of the tokens `index`, int64 [n]."""


@dataclass(frozen=True)
class DenseTokens:
    """A source of the given keys [tokens, key_dim] and values [tokens, value_dim]."""

    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return self.key.shape[0]

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.key[index], self.value[index]


@dataclass(frozen=True)
class NewTokens:
    """Tokens to add, sorted by row.

    Attributes:
        row: row of each token, int64 [n].
        score: significance sums, float32 [n].
        position: positions, int64 [n].
        sources: sources of keys and values.
        origin: index of each token within the concatenated sources, int64 [n].
    """

    row: Tensor
    score: Tensor
    position: Tensor
    sources: tuple[TokenSource, ...]
    origin: Tensor

    @classmethod
    def of(cls, row: Tensor, source: TokenSource, score: Tensor, position: Tensor) -> NewTokens:
        """Creates the tokens of one source, in its order."""
        return cls(row, score, position, (source,), torch.arange(row.numel(), device=row.device))

    def select(self, mask: Tensor) -> NewTokens:
        parts = (part[mask] for part in (self.row, self.score, self.position))
        return NewTokens(*parts, self.sources, self.origin[mask])

    def merge(self, other: NewTokens) -> NewTokens:
        """Merges both, with `self` before `other` within each row."""
        if not self.row.numel() or not other.row.numel():
            return self if other.row.numel() == 0 else other
        order = torch.argsort(torch.cat([self.row, other.row]), stable=True)
        origin = other.origin + sum(map(len, self.sources))
        pairs = ((self.row, other.row), (self.score, other.score), (self.position, other.position))
        parts = [torch.cat(pair)[order] for pair in pairs]
        return NewTokens(*parts, self.sources + other.sources, torch.cat([self.origin, origin])[order])

    def read(self, part: slice) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the tokens in `part`, [n, dim]."""
        origin = self.origin[part]
        if len(self.sources) == 1:
            return self.sources[0].read(origin)
        pieces, places, start = [], [], 0
        for source in self.sources:
            here = ((origin >= start) & (origin < start + len(source))).nonzero()[:, 0]
            pieces.append(source.read(origin[here] - start))
            places.append(here)
            start += len(source)
        back = torch.argsort(torch.cat(places))
        dtype = reduce(torch.promote_types, (key.dtype for key, _ in pieces))
        return tuple(torch.cat([piece[side].to(dtype) for piece in pieces])[back] for side in (0, 1))

    def parts(self) -> list[slice]:
        """Returns slices that cover all tokens; each is copied at once."""
        step = READ_TOKENS if self.row.device.type == "cpu" else READ_TOKENS_BY_KERNELS
        return [slice(start, start + step) for start in range(0, self.row.numel(), step)]


@dataclass(frozen=True)
class StoredTokens:
    """All tokens of one tier in row order.

    Attributes:
        row: row of each token, int64 [n].
        index: index within the row and tier, int64 [n].
        page, slot: page id and slot within the page, int64 [n].
    """

    row: Tensor
    index: Tensor
    page: Tensor
    slot: Tensor


def stored_tokens(rows: LayerRows, tier: int) -> StoredTokens:
    """Lists a tier's tokens."""
    count, capacity = rows.counts[tier].view(-1).long(), rows.tiers[tier].capacity
    row = torch.repeat_interleave(torch.arange(count.numel(), device=rows.device), count)
    index = torch.arange(row.numel(), device=rows.device) - (count.cumsum(0) - count)[row]
    page = rows.page_table.view(-1, rows.width)[row, column(tier, index // capacity, rows.width)].long()
    return StoredTokens(row, index, page, index % capacity)


def token_positions(rows: LayerRows, tier: int, tokens: StoredTokens) -> Tensor:
    """Returns each stored token's index among the real tokens of its request, int64 [n].

    If pages hold no positions, a row stores every token after its sinks.
    """
    layout = rows.tiers[tier]
    if layout.position_bytes == 0:
        return rows.sink_end[tokens.row // rows.heads] + tokens.index
    return segments(rows.pages, layout).positions(tokens.page, tokens.slot).long()


def rewrite_rows(
    ops: Ops,
    rows: LayerRows,
    stored: tuple[StoredTokens, StoredTokens],
    keep: tuple[Tensor, Tensor],
    demoted: Tensor,
    new: tuple[NewTokens, NewTokens],
    feedback: Tensor | None = None,
) -> None:
    """Removes, demotes and adds tokens, and takes or frees whole pages.

    If pages hold no positions, the kept tokens keep their order; otherwise the last tokens fill the holes.

    Args:
        ops: ops for these rows.
        rows: rows to rewrite.
        stored: stored tokens of each tier (high, low).
        keep: True for tokens that stay in their tier, bool [n] for each tier.
        demoted: True for high tokens that are not kept but move to the low tier, bool [n]; never set if pages hold no
            positions.
        new: tokens to add to each tier.
        feedback: matrices that added keys are rounded by (ops/rounding), [rows, key_dim, key_dim]; None rounds each
            element to the nearest code.

    Raises:
        MemoryError: the pool cannot hold the result; nothing has changed.
    """
    added = new
    if rows.layout.selects:
        added = (new[HIGH], _demoted_tokens(ops, rows, stored[HIGH], demoted).merge(new[LOW]))
    plans = []
    for tier, layout in enumerate(rows.tiers):
        kept = torch.bincount(stored[tier].row[keep[tier]], minlength=rows.count)
        after = kept + torch.bincount(added[tier].row, minlength=rows.count)
        plans.append((kept, after, _pages(rows.counts[tier].view(-1).long(), layout), _pages(after, layout)))
    taken = sum(int((need - have).clamp(min=0).sum()) for _, _, have, need in plans)
    given = sum(int((have - need).clamp(min=0).sum()) for _, _, have, need in plans)
    rows.pool.ensure_free(max(0, taken - given))

    # most prompts follow no stored tokens or use one tier; operations on nothing would dominate the time
    held = [tier for tier in (HIGH, LOW) if stored[tier].row.numel()]
    for tier in held:
        if rows.layout.selects:
            _close_holes(ops, rows, tier, stored[tier], keep[tier], plans[tier][0])
        else:
            _close_ranks(rows, tier, stored[tier], keep[tier], plans[tier][0])
    for tier in held if given else ():
        _give_pages(rows, tier, *plans[tier][2:])
    for tier in (HIGH, LOW):
        kept, after, have, need = plans[tier]
        if added[tier].row.numel():
            _take_pages(rows, tier, have, need)
            _append(ops, rows, tier, kept, added[tier], feedback)
        rows.counts[tier].view(-1).copy_(after)


def _pages(count: Tensor, layout: TierLayout) -> Tensor:
    return (count + layout.capacity - 1) // layout.capacity


def _demoted_tokens(ops: Ops, rows: LayerRows, stored: StoredTokens, demoted: Tensor) -> NewTokens:
    page, slot, layout = stored.page[demoted], stored.slot[demoted], rows.layout.high
    key, value = ops.load_tokens(rows.pages, layout, page, slot, rows.dtype)
    view = segments(rows.pages, layout)
    score, position = view.scores(page, slot), view.positions(page, slot).long()
    return NewTokens.of(stored.row[demoted], DenseTokens(key, value), score, position)


def _close_holes(ops: Ops, rows: LayerRows, tier: int, stored: StoredTokens, keep: Tensor, kept: Tensor) -> None:
    """Moves each row's last tokens into the slots of removed ones."""
    inside = stored.index < kept[stored.row]
    # each row has as many holes inside as kept tokens outside, and both lists are in row order
    holes, movers = ~keep & inside, keep & ~inside
    old, new = (stored.page[movers], stored.slot[movers]), (stored.page[holes], stored.slot[holes])
    ops.move_tokens(rows.pages, rows.tiers[tier], *old, *new)


def _close_ranks(rows: LayerRows, tier: int, stored: StoredTokens, keep: Tensor, kept: Tensor) -> None:
    """Moves each row's tokens forward over removed ones, keeping their order."""
    rank = keep.cumsum(0) - 1 - (kept.cumsum(0) - kept)[stored.row]
    old = (keep & (rank < stored.index)).nonzero()[:, 0]
    new = old - (stored.index - rank)[old]
    # a target slot may hold another token: each part is read before it is written, and later parts lie further back
    for start in range(0, old.numel(), MOVE_TOKENS):
        places = (each[start : start + MOVE_TOKENS] for each in (old, new))
        (page, slot), (to_page, to_slot) = ((stored.page[place], stored.slot[place]) for place in places)
        move_tokens(rows.pages, rows.tiers[tier], page, slot, to_page, to_slot)


def _entries(rows: LayerRows, tier: int, count: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row and table column of each row's `count` entries, starting at its page `first` of the tier."""
    row = torch.repeat_interleave(torch.arange(count.numel(), device=count.device), count)
    index = torch.arange(row.numel(), device=count.device) - (count.cumsum(0) - count)[row] + first[row]
    return row, column(tier, index, rows.width)


def _give_pages(rows: LayerRows, tier: int, have: Tensor, need: Tensor) -> None:
    row, entry = _entries(rows, tier, (have - need).clamp(min=0), need)
    table = rows.page_table.view(-1, rows.width)
    rows.free_list.give(table[row, entry])
    table[row, entry] = NULL_PAGE


def _take_pages(rows: LayerRows, tier: int, have: Tensor, need: Tensor) -> None:
    demand = (need - have).clamp(min=0)
    row, entry = _entries(rows, tier, demand, have)
    _, ids = rows.free_list.take(demand)
    rows.page_table.view(-1, rows.width)[row, entry] = ids.to(torch.int32)


def _append(ops: Ops, rows: LayerRows, tier: int, kept: Tensor, new: NewTokens, feedback: Tensor | None) -> None:
    layout, pages = rows.tiers[tier], rows.pages
    added = torch.bincount(new.row, minlength=kept.numel())
    rank = torch.arange(new.row.numel(), device=new.row.device) - (added.cumsum(0) - added)[new.row]
    index = kept[new.row] + rank
    entry = column(tier, index // layout.capacity, rows.width)
    page = rows.page_table.view(-1, rows.width)[new.row, entry].long()
    slot = index % layout.capacity
    for part in new.parts():
        key, value = new.read(part)
        if feedback is not None and layout.k_bits <= LARGEST_BITS and key.shape[0]:
            key = ops.round_keys(key, new.row[part], feedback, layout)
        contents = Contents(key, value, new.score[part], new.position[part])
        ops.store_tokens(pages, layout, page[part], slot[part], contents, rows.dtype)
