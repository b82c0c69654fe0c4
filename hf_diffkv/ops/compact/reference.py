"""One compaction of all rows by Algorithm 1 (DiffKV, section 4.3) in plain PyTorch with fixed shapes.

A row is one (layer, request, KV head). Nothing is read back to the host: rows without work write to the null page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...pages import HIGH, LOW, NULL_PAGE, FreeList, LayerRows, PageLayout, TierLayout, column
from ...pages.rows import slots_of
from ...pages.segments import Contents, as_positions, as_scores, segments
from ..quantize.reference import load_tokens, store_tokens
from ..rounding import LARGEST_BITS, ModelFeedback
from ..rounding.reference import round_keys
from ..tiles import Bounds, Tiles


class Candidates(NamedTuple):
    """The oldest window token of each row, which is the next to leave.

    Attributes:
        key, value: key and value, [rows, dim] in the model's dtype.
        score: significance sum, float32 [rows].
        position: position, int64 [rows].
        leaving: True for rows that have a candidate, bool [rows].
        length: real tokens seen, int64 [rows].
    """

    key: Tensor
    value: Tensor
    score: Tensor
    position: Tensor
    leaving: Tensor
    length: Tensor


def candidates(rows: LayerRows, leaving: Tensor) -> Candidates:
    """Reads the candidates of all rows; `leaving`, bool [batch], marks the windows that a token leaves."""

    def of_rows(each: Tensor) -> Tensor:
        # for a single request, reshaping would return an expanded view, whose strides the kernels ignore
        return each[:, None].expand(-1, rows.heads).contiguous().view(-1)

    slot = slots_of(rows.window_start, rows.sink_end, rows.sink_slots, rows.slots)
    slot = slot[:, None, None].expand(-1, rows.heads, 1)
    key, value = (
        window.gather(2, slot[..., None].expand(-1, -1, -1, window.shape[3])).view(rows.count, -1)
        for window in (rows.window_key, rows.window_value)
    )
    score = rows.window_score.gather(2, slot).view(-1)
    return Candidates(key, value, score, *map(of_rows, (rows.window_start, leaving, rows.length)))


def compact_windows(
    rows: LayerRows,
    window: int,
    high_threshold: Tensor,
    low_threshold: Tensor | None,
    *,
    bounds: Bounds,
    flag: Tensor | None = None,
    feedback: ModelFeedback | None = None,
) -> None:
    """Moves the oldest token of overfull windows to a tier, displacing at most one victim, or prunes it.

    The start of these windows advances by one.

    Args:
        rows: rows of all layers; the caller guarantees one free page per row and tier.
        window: tokens that a window may keep, not counting sinks.
        high_threshold, low_threshold: thresholds on mean significance, float32 [batch, heads]. If pages have no scores,
            pass `alpha_high` of `rows` and None: candidates go to the high tier where it is 0, otherwise to the low.
        bounds: the host's upper bounds on the rows' lengths, with tiles.
        flag: error bits on the device, int32 [1]; bits are set and never cleared. Bit 1: too few pages were free. Bit
            2: the two ends of a table row would have met. In both cases the compaction was cancelled: the candidates
            are not stored, and only the windows' starts have changed. The reference does not use it.
        feedback: matrices that round keys of at most `LARGEST_BITS` bits, including victims' keys; None rounds to
            nearest.
    """
    leaving = rows.length - rows.window_start > window
    _move(rows, candidates(rows, leaving), high_threshold, low_threshold, bounds.tiles, feedback)
    rows.window_start.add_(leaving)


def _move(
    rows: LayerRows,
    candidate: Candidates,
    high_threshold: Tensor,
    low_threshold: Tensor | None,
    tiles: tuple[Tiles, Tiles],
    feedback: ModelFeedback | None,
) -> None:
    key, value, score, position, leaving, length = candidate
    pages, layout, free_list = rows.pages, rows.layout, rows.free_list
    page_table, high_count, low_count = (x.view(rows.count, *x.shape[2:]) for x in (rows.page_table, *rows.counts))
    high_threshold = high_threshold.reshape(-1)
    if not layout.selects:
        to_low = leaving & (high_threshold > 0)
        appends, counts = (leaving & ~to_low, to_low), (high_count, low_count)
        _add_pages(free_list, layout, page_table, appends, counts)
        for tier, tier_layout in enumerate(rows.tiers):
            page, slot = _locate(page_table, tier, tier_layout, counts[tier].long(), appends[tier])
            contents = Contents(_rounded(key, feedback, tier_layout), value, score, position)
            store_tokens(pages, tier_layout, page, slot, contents, key.dtype)
            counts[tier].add_(appends[tier])
        return
    low_threshold = low_threshold.reshape(-1)
    mean = _mean(score, position, length)
    to_high = leaving & (mean >= high_threshold)
    to_low = leaving & ~to_high & (mean >= low_threshold)

    victim, victim_mean = _least_significant(pages, layout.high, HIGH, page_table, high_count, length, tiles[HIGH])
    displaced_high = to_high & (victim_mean < high_threshold)
    demoted = displaced_high & (victim_mean >= low_threshold)
    low_victim, low_mean = _least_significant(pages, layout.low, LOW, page_table, low_count, length, tiles[LOW])
    displaced_low = to_low & (low_mean < low_threshold)

    append_high = to_high & ~displaced_high
    append_low = demoted | (to_low & ~displaced_low)
    _add_pages(free_list, layout, page_table, (append_high, append_low), (high_count, low_count))

    victim_page, victim_slot = _locate(page_table, HIGH, layout.high, victim, demoted)
    moved_key, moved_value = load_tokens(pages, layout.high, victim_page, victim_slot, key.dtype)
    view = segments(pages, layout.high)
    moved_score, moved_position = view.scores(victim_page, victim_slot), view.positions(victim_page, victim_slot)

    slot = torch.where(displaced_high, victim, high_count.long())
    page, slot = _locate(page_table, HIGH, layout.high, slot, to_high)
    contents = Contents(_rounded(key, feedback, layout.high), value, score, position)
    store_tokens(pages, layout.high, page, slot, contents, key.dtype)

    slot = torch.where(displaced_low, low_victim, low_count.long())
    page, slot = _locate(page_table, LOW, layout.low, slot, demoted | to_low)
    pick = demoted[:, None]
    contents = Contents(
        _rounded(torch.where(pick, moved_key, key.to(moved_key.dtype)), feedback, layout.low),
        torch.where(pick, moved_value, value.to(moved_value.dtype)),
        torch.where(demoted, moved_score, score),
        torch.where(demoted, moved_position.long(), position),
    )
    store_tokens(pages, layout.low, page, slot, contents, key.dtype)
    high_count += append_high
    low_count += append_low


def _rounded(key: Tensor, feedback: ModelFeedback | None, tier: TierLayout) -> Tensor:
    """Returns the keys of all rows, rounded by the feedback if it applies to the tier."""
    if feedback is None or tier.k_bits > LARGEST_BITS:
        return key
    return round_keys(key, feedback.of_rows(key.shape[0]), feedback.matrices, tier)


def _mean(score: Tensor, position: Tensor, length: Tensor) -> Tensor:
    return score / (length - 1 - position).clamp(min=1).float()


def _least_significant(
    pages: Tensor, layout: TierLayout, tier: int, table: Tensor, count: Tensor, length: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Returns the slot (int64 [rows]) and mean (float32 [rows]) of each row's least significant token.

    Ties go to the oldest token. A row without tokens has mean +inf.
    """
    rows, width = table.shape
    slots = torch.zeros(rows, dtype=torch.int64, device=table.device)
    means = torch.full((rows,), torch.inf, dtype=torch.float32, device=table.device)
    if not tiles.row.numel():
        return slots, means
    row, full, capacity = tiles.row, tiles.full, layout.capacity
    page = tiles.first[:, None] + torch.arange(tiles.pages, device=table.device)
    entry = table[row[:, None], column(tier, page.clamp(max=width - 1), width)]
    ids = torch.where(page * capacity < count[row, None], entry, NULL_PAGE).flatten().long()
    view = segments(pages, layout)
    position = as_positions(view.position.index_select(0, ids)).view(row.numel(), -1)
    score = as_scores(view.score.index_select(0, ids)).view(row.numel(), -1)
    mean = score.div_((length[row, None].int() - 1 - position).clamp_(min=1))
    slot = tiles.first[full:, None] * capacity + torch.arange(tiles.pages * capacity, device=table.device)
    mean[full:].masked_fill_(slot >= count[row[full:], None], torch.inf)

    means.scatter_reduce_(0, row, mean.amin(1), "amin")
    farthest = torch.iinfo(torch.int32).max
    oldest, index = position.masked_fill_(mean != means[row, None], farthest).min(1)
    of_row = torch.full((rows,), farthest, dtype=torch.int32, device=table.device)
    of_row.scatter_reduce_(0, row, oldest, "amin")
    chosen = torch.where(oldest == of_row[row], tiles.first * capacity + index, 0)
    slots.scatter_reduce_(0, row, chosen, "amax")
    return slots, means


def _add_pages(
    free_list: FreeList,
    layout: PageLayout,
    table: Tensor,
    appends: tuple[Tensor, Tensor],
    counts: tuple[Tensor, Tensor],
) -> None:
    """Gives a page to every row whose next token starts one; both tiers share one prefix sum."""
    needs = [
        append & (count % tier.capacity == 0) for append, count, tier in zip(appends, counts, (layout.high, layout.low))
    ]
    fresh = free_list.take_at_most_one(torch.cat(needs)).chunk(2)
    for tier, (need, new, count, tier_layout) in enumerate(zip(needs, fresh, counts, (layout.high, layout.low))):
        entry = column(tier, (count // tier_layout.capacity).clamp(max=table.shape[1] - 1), table.shape[1]).long()
        current = table.gather(1, entry[:, None])[:, 0]
        table.scatter_(1, entry[:, None], torch.where(need, new.to(table.dtype), current)[:, None])


def _locate(table: Tensor, tier: int, layout: TierLayout, slot: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the page of each row's `slot`-th token and its slot there; the null page for inactive rows."""
    width = table.shape[1]
    entry = column(tier, (slot // layout.capacity).clamp(max=width - 1), width)
    page = table.gather(1, entry[:, None])[:, 0].long()
    return torch.where(active, page, NULL_PAGE), slot % layout.capacity
