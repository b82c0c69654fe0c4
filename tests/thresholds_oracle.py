"""Expected results of `ops/store_prompt` with thresholds, in plain PyTorch, row by row."""

from __future__ import annotations

import torch
from torch import Tensor
from uniform_oracle import Exact, exact_tokens, keep_exact

from hf_diffkv.ops.quantize.reference import load_tokens, move_tokens, store_tokens
from hf_diffkv.ops.rounding.reference import LARGEST_BITS, round_keys
from hf_diffkv.ops.store_prompt.tokens import Placement, PromptTokens
from hf_diffkv.pages import (
    HIGH,
    HIGH_LEVEL,
    LOW,
    LOW_LEVEL,
    NULL_PAGE,
    PRUNED_LEVEL,
    FreeList,
    LayerRows,
    TierLayout,
    column,
)
from hf_diffkv.pages.rows import held_tokens
from hf_diffkv.pages.segments import Contents, score_noise, segments


def store_prompt(rows: LayerRows, new: PromptTokens, placement: Placement, past: int, received: Tensor) -> None:
    """Arguments as in the op; the length of the longest row is not used."""
    rows.check_tokens(new.key, new.value)
    feedback = placement.feedback
    # ranks in the window, by position, before anything changes
    held = _held_ranks(rows)
    exact = exact_tokens(rows, new, placement)
    score = _exact_sums(rows, exact, held, received, new.key.shape[2])
    given = []
    for request, head in torch.cartesian_prod(*map(torch.arange, rows.high_count.shape)).tolist():
        one = _Row(rows, exact, score, request, head)
        matrix = None if feedback is None else feedback[request * rows.heads + head][None]
        given += one.relevel(received[request, head], rows.free_list, matrix)
    for entries in given:
        rows.free_list.give(entries)
    keep_exact(rows, exact, score)
    rows.length.copy_(exact.length)
    rows.window_start.copy_(exact.start)


def _held_ranks(rows: LayerRows) -> Tensor:
    """Number of window tokens before each slot's token, int64 [batch, slots]."""
    slots = rows.slots
    token = held_tokens(rows.window_start, rows.length, rows.sink_end, rows.sink_slots, slots)
    earlier = (token[:, None, :] >= 0) & (token[:, None, :] < token[:, :, None])
    return earlier.sum(-1)


def _exact_sums(
    rows: LayerRows,
    exact: Exact,
    held: Tensor,
    received: Tensor,
    tokens: int,
) -> Tensor:
    """Sums of the exact tokens, float32 [batch, heads, n]."""
    slots = held.shape[1]
    first = (rows.high_count + rows.low_count).long()[..., None] + held[:, None]
    # slots without a token may point past the last column
    got = received.gather(2, first.clamp(max=received.shape[2] - 1))
    there = exact.token[:, None, :slots] >= 0
    before = torch.where(there, rows.window_score + got, 0.0)
    return torch.cat([before, received[..., received.shape[2] - tokens :]], dim=2)


class _Row:
    """One request and head."""

    def __init__(self, rows: LayerRows, exact: Exact, score: Tensor, request: int, head: int) -> None:
        self.pages, self.tiers = rows.pages, rows.tiers
        self.counts = (rows.high_count[request, head], rows.low_count[request, head])
        self.table = rows.page_table[request, head]
        self.length = exact.length[request]
        self.alphas = (rows.alpha_high[request, head], rows.alpha_low[request, head])
        # tokens that leave the window, oldest first: those in it before, then new ones
        place = exact.leaves[request].nonzero()[:, 0]
        self.position = exact.token[request, place].sort().values
        place = place[exact.token[request, place].argsort()]
        self.key, self.value = exact.key[request, head, place], exact.value[request, head, place]
        self.score, self.dtype = score[request, head, place], exact.key.dtype

    def relevel(self, received: Tensor, free_list: FreeList, feedback: Tensor | None) -> list[Tensor]:
        """Returns the page ids that the row gives back, in the order of its tiers."""
        earned, first = [], 0
        for tier in (HIGH, LOW):
            index = torch.arange(int(self.counts[tier]), device=self.pages.device)
            page, slot = self._places(tier, index)
            view = segments(self.pages, self.tiers[tier])
            score = view.scores(page, slot) + received[first : first + index.numel()]
            view.write_scores(page, slot, score, score_noise(index, self.length, tier))
            level = self._level(score, view.positions(page, slot).long())
            earned.append(level.clamp(max=(HIGH_LEVEL, LOW_LEVEL)[tier]))
            first += index.numel()
        kept = (earned[HIGH] == HIGH_LEVEL, earned[LOW] == LOW_LEVEL)
        leaving = self._level(self.score, self.position)
        sinking = (earned[HIGH] == LOW_LEVEL).nonzero()[:, 0]
        added = ((leaving == HIGH_LEVEL).nonzero()[:, 0], (leaving == LOW_LEVEL).nonzero()[:, 0])
        after = [int(kept[tier].sum()) + added[tier].numel() for tier in (HIGH, LOW)]
        after[LOW] += sinking.numel()
        pages = [self._pages(tier, after[tier], free_list) for tier in (HIGH, LOW)]

        # what sinks is read before its slot is written
        page, slot = self._places(HIGH, sinking)
        view = segments(self.pages, self.tiers[HIGH])
        sunk = (*load_tokens(self.pages, self.tiers[HIGH], page, slot, self.dtype), view.scores(page, slot))
        position = view.positions(page, slot).long()
        arriving = [(self.key[i], self.value[i], self.score[i], self.position[i]) for i in added]
        arriving[LOW] = tuple(
            torch.cat([old.to(torch.promote_types(old.dtype, new.dtype)), new])
            for old, new in zip((*sunk, position), arriving[LOW])
        )
        for tier in (LOW, HIGH):
            self._fill(tier, kept[tier], after[tier], pages[tier], arriving[tier], feedback)
        given = []
        self.table.fill_(NULL_PAGE)
        for tier in (HIGH, LOW):
            need = -(-after[tier] // self.tiers[tier].capacity)
            entry = column(tier, torch.arange(need, device=self.table.device), self.table.numel())
            self.table[entry] = pages[tier][:need].to(self.table.dtype)
            given.append(pages[tier][need:])
            self.counts[tier].fill_(after[tier])
        return given

    def _level(self, score: Tensor, position: Tensor) -> Tensor:
        """int64 levels by the thresholds."""
        mean = score / (self.length - 1 - position).clamp(min=1).float()
        high, low = (alpha / self.length.float() for alpha in self.alphas)
        return torch.where(mean >= high, HIGH_LEVEL, torch.where(mean >= low, LOW_LEVEL, PRUNED_LEVEL))

    def _places(self, tier: int, index: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pages and slots of tokens; ids: of the tier's pages, None for those in the table."""
        capacity = self.tiers[tier].capacity
        if ids is None:
            ids = self.table[column(tier, torch.arange(self.table.numel(), device=index.device), self.table.numel())]
        return ids[index // capacity].long(), index % capacity

    def _pages(self, tier: int, after: int, free_list: FreeList) -> Tensor:
        """Page ids of a tier, including those that it lacks."""
        capacity = self.tiers[tier].capacity
        have, need = -(-int(self.counts[tier]) // capacity), -(-after // capacity)
        entry = column(tier, torch.arange(have, device=self.table.device), self.table.numel())
        _, fresh = free_list.take(torch.tensor([max(0, need - have)], device=self.table.device))
        return torch.cat([self.table[entry].long(), fresh])

    def _fill(
        self,
        tier: int,
        kept: Tensor,
        after: int,
        ids: Tensor,
        arriving: tuple[Tensor, ...],
        feedback: Tensor | None,
    ) -> None:
        """Fills free slots below the new end with added tokens, then with kept tokens from past it, last first."""
        layout: TierLayout = self.tiers[tier]
        old = torch.arange(max(after, kept.numel()), device=kept.device)
        holds = torch.zeros_like(old, dtype=torch.bool)
        holds[: kept.numel()] = kept
        target, movers = old[~holds & (old < after)], old[holds & (old >= after)].flip(0)
        key, value, score, position = arriving
        count = position.numel()
        to_page, to_slot = self._places(tier, target, ids)
        if feedback is not None and layout.k_bits <= LARGEST_BITS and count:
            key = round_keys(key, torch.zeros(count, dtype=torch.int64, device=key.device), feedback, layout)
        page, slot = self._places(tier, movers, ids)
        move_tokens(self.pages, layout, page, slot, to_page[count:], to_slot[count:])
        contents = Contents(key, value, score, position)
        store_tokens(self.pages, layout, to_page[:count], to_slot[:count], contents, self.dtype)
