"""Rewriting rows after a prompt or any forward of several tokens: many tokens may leave, sink or arrive at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...pages import HIGH, LOW, NULL_PAGE, PageLayout, PagePool, TierLayout, column
from ...pages.segments import segments
from ..quantize import Contents, load_tokens, move_tokens, store_tokens
from ..quantize.reference import move_tokens as move_through_copy
from ..rounding import round_keys
from .tokens import Given, NewTokens

# tokens that are moved through a copy at once
MOVE_TOKENS = 1 << 14


@dataclass(frozen=True)
class StoredTokens:
    """Every token of one tier in row order: its row, its index within the row, and where it stands. int64 [n]."""

    row: Tensor
    index: Tensor
    page: Tensor
    slot: Tensor


def stored_tokens(table: Tensor, count: Tensor, tier: int, layout: TierLayout) -> StoredTokens:
    """Lists a tier's tokens. table: int32 [rows, width]; count: int [rows]."""
    rows = torch.arange(count.numel(), device=table.device)
    row = torch.repeat_interleave(rows, count.long())
    starts = count.long().cumsum(0) - count
    index = torch.arange(row.numel(), device=table.device) - starts[row]
    page = table[row, column(tier, index // layout.capacity, table.shape[1])].long()
    return StoredTokens(row, index, page, index % layout.capacity)


def token_positions(pages: Tensor, layout: TierLayout, tokens: StoredTokens, sink_end: Tensor) -> Tensor:
    """Each stored token's index among the real tokens of its request, int64 [n].

    Args:
        layout: of the tokens' tier.
        sink_end: int64 [rows], where the row's sinks end: there its tokens begin where pages hold no positions.
    """
    if layout.position_bytes == 0:
        return sink_end[tokens.row] + tokens.index
    return segments(pages, layout).positions(tokens.page, tokens.slot).long()


def rewrite_rows(
    pool: PagePool,
    layout: PageLayout,
    table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    stored: tuple[StoredTokens, StoredTokens],
    keep: tuple[Tensor, Tensor],
    demoted: Tensor,
    new: tuple[NewTokens, NewTokens],
    dtype: torch.dtype,
    feedback: Tensor | None = None,
) -> None:
    """Removes, demotes and adds tokens, and takes or gives back whole pages.

    What stays keeps its order where pages hold no positions; elsewhere the last tokens fill the holes.

    Args:
        table: int32 [rows, width], written. high_count, low_count: int32 [rows], written.
        stored: what each tier holds (high, low). keep: bool [n], what of it stays in its tier.
        demoted: bool [n] over the high tier, tokens not kept there that move to the low tier; none where pages hold
            no positions.
        new: tokens to add to each tier.
        dtype: the model's dtype.
        feedback: [rows, key_dim, key_dim] that added keys are rounded with (ops/rounding); None rounds each for itself.

    Raises:
        MemoryError: the pool cannot hold the result; nothing has changed then.
    """
    pages = pool.pages
    added = new
    if layout.selects:
        sinking = _demoted_tokens(pages, layout.high, stored[HIGH], demoted, dtype)
        added = (new[HIGH], sinking.merge(new[LOW]))
    counts = (high_count, low_count)
    plans = []
    for tier, tier_layout in ((HIGH, layout.high), (LOW, layout.low)):
        rows = high_count.numel()
        kept = torch.bincount(stored[tier].row[keep[tier]], minlength=rows)
        after = kept + torch.bincount(added[tier].row, minlength=rows)
        plans.append((kept, after, _pages(counts[tier].long(), tier_layout), _pages(after, tier_layout)))
    taken = sum(int((need - have).clamp(min=0).sum()) for _, _, have, need in plans)
    given = sum(int((have - need).clamp(min=0).sum()) for _, _, have, need in plans)
    pool.ensure_free(max(0, taken - given))
    pages = pool.pages

    for tier, tier_layout in ((HIGH, layout.high), (LOW, layout.low)):
        if layout.selects:
            _close_holes(pages, tier_layout, stored[tier], keep[tier], plans[tier][0], dtype)
        else:
            _close_ranks(pages, tier_layout, stored[tier], keep[tier], plans[tier][0])
    for tier in (HIGH, LOW):
        _give_pages(pool, table, tier, *plans[tier][2:])
    for tier, tier_layout in ((HIGH, layout.high), (LOW, layout.low)):
        kept, after, have, need = plans[tier]
        _take_pages(pool, table, tier, have, need)
        _append(pages, tier_layout, table, tier, kept, added[tier], dtype, feedback)
        counts[tier].copy_(after)


def _pages(count: Tensor, layout: TierLayout) -> Tensor:
    return (count + layout.capacity - 1) // layout.capacity


def _demoted_tokens(
    pages: Tensor, layout: TierLayout, stored: StoredTokens, demoted: Tensor, dtype: torch.dtype
) -> NewTokens:
    page, slot = stored.page[demoted], stored.slot[demoted]
    key, value = load_tokens(pages, layout, page, slot, dtype)
    view = segments(pages, layout)
    score, position = view.scores(page, slot), view.positions(page, slot).long()
    return NewTokens.of(stored.row[demoted], Given(key, value), score, position)


def _close_holes(
    pages: Tensor, layout: TierLayout, stored: StoredTokens, keep: Tensor, kept: Tensor, dtype: torch.dtype
) -> None:
    """Moves each row's last tokens into the slots of removed ones."""
    inside = stored.index < kept[stored.row]
    # per row there are as many holes inside as tokens outside, and both lists are in row order
    holes, movers = ~keep & inside, keep & ~inside
    old, new = (stored.page[movers], stored.slot[movers]), (stored.page[holes], stored.slot[holes])
    move_tokens(pages, layout, *old, *new, dtype)


def _close_ranks(pages: Tensor, layout: TierLayout, stored: StoredTokens, keep: Tensor, kept: Tensor) -> None:
    """Moves each row's tokens up to where the ones before them were removed."""
    rank = keep.cumsum(0) - 1 - (kept.cumsum(0) - kept)[stored.row]
    old = (keep & (rank < stored.index)).nonzero()[:, 0]
    new = old - (stored.index - rank)[old]
    # a token may stand where another one goes: each part is read before it is written, and what follows stands behind
    for start in range(0, old.numel(), MOVE_TOKENS):
        places = (each[start : start + MOVE_TOKENS] for each in (old, new))
        (page, slot), (to_page, to_slot) = ((stored.page[place], stored.slot[place]) for place in places)
        move_through_copy(pages, layout, page, slot, to_page, to_slot)


def _entries(count: Tensor, first: Tensor, tier: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column of `count` entries of each row from its `first` page of the tier on."""
    row = torch.repeat_interleave(torch.arange(count.numel(), device=count.device), count)
    index = torch.arange(row.numel(), device=count.device) - (count.cumsum(0) - count)[row] + first[row]
    return row, column(tier, index, width)


def _give_pages(pool: PagePool, table: Tensor, tier: int, have: Tensor, need: Tensor) -> None:
    row, entry = _entries((have - need).clamp(min=0), need, tier, table.shape[1])
    pool.free_list.give(table[row, entry])
    table[row, entry] = NULL_PAGE


def _take_pages(pool: PagePool, table: Tensor, tier: int, have: Tensor, need: Tensor) -> None:
    demand = (need - have).clamp(min=0)
    row, entry = _entries(demand, have, tier, table.shape[1])
    _, ids = pool.free_list.take(demand)
    table[row, entry] = ids.to(table.dtype)


def _append(
    pages: Tensor,
    layout: TierLayout,
    table: Tensor,
    tier: int,
    kept: Tensor,
    new: NewTokens,
    dtype: torch.dtype,
    feedback: Tensor | None,
) -> None:
    added = torch.bincount(new.row, minlength=kept.numel())
    rank = torch.arange(new.row.numel(), device=new.row.device) - (added.cumsum(0) - added)[new.row]
    index = kept[new.row] + rank
    page = table[new.row, column(tier, index // layout.capacity, table.shape[1])].long()
    slot = index % layout.capacity
    for part in new.parts():
        key, value = new.read(part)
        if feedback is not None:
            key = round_keys(key, new.row[part], feedback, layout)
        contents = Contents(key, value, new.score[part], new.position[part])
        store_tokens(pages, layout, page[part], slot[part], contents, dtype)
