"""Keeps a store under `max_bytes` by tightening its thresholds.

Tightening by `strength` raises alpha_high to at least `strength` and alpha_low to at least a tenth of it. Where a head
has no low tier, alpha_low is raised to `strength` too. The least significant tokens are thus demoted and pruned first.
Thresholds are never lowered again.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.compact import DenseTokens, NewTokens, StoredTokens, rewrite_rows, stored_tokens
from ..pages import HIGH, HIGH_LEVEL, LOW, LOW_LEVEL, PRUNED_LEVEL, LayerRows
from ..pages.segments import segments
from ..policy import levels_between, mean_significance
from .prompt_kernels import pages_of
from .state import Changing, Store

LOW_SHARE = 0.1
SEARCH_STEPS = 24
STRONGEST = 1e6
# share of the pages in use after tightening; the rest keeps tightening rare
FILLED_SHARE = 0.9
# tokens that each row's high and low tier may gain, int64 [rows] each
Growth = tuple[Tensor, Tensor]


def check_budget(store: Store, more: int) -> None:
    """Sets the pool's limit; raises `MemoryError` unless `more` bytes outside the pool fit into the budget."""
    store.update_limit(more)
    if store.max_bytes is not None and more > 0 and store.bytes + more > store.max_bytes:
        raise MemoryError(
            f"{more} more bytes do not fit into max_bytes={store.config.max_bytes}; raise max_bytes, or use fewer "
            "sequences."
        )


@dataclass(frozen=True)
class Weighed:
    """All tokens that some rows hold outside the window.

    Attributes:
        row: row of each token, int64 [n].
        relative: relative significance, mean * N, float32 [n].
        level: highest level the token may have, int8 [n].
    """

    row: Tensor
    relative: Tensor
    level: Tensor

    def below(self, alpha_high: Tensor, alpha_low: Tensor) -> Weighed:
        """Returns the tokens with levels capped by relative thresholds, float32 [rows]."""
        earned = levels_between(self.relative, alpha_high[self.row], alpha_low[self.row])
        return replace(self, level=torch.minimum(self.level, earned))


def tightened(alpha_high: Tensor, alpha_low: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Returns both thresholds tightened by `strength`; float32, both of the same shape."""
    _, least_low = _least(alpha_high, alpha_low, strength)
    high = alpha_high.clamp(min=strength)
    return high, torch.minimum(torch.maximum(alpha_low, least_low), high)


def _least(alpha_high: Tensor, alpha_low: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Returns the lower bounds that tightening sets for both thresholds."""
    share = torch.where(alpha_low < alpha_high, LOW_SHARE, torch.ones_like(alpha_low))
    return torch.full_like(share, strength), share * strength


def fit(
    store: Store, alpha_high: Tensor, alpha_low: Tensor, tokens: Weighed, allowed: int, growth: Growth | None = None
) -> float:
    """Returns the smallest strength with which `tokens` and `growth` need at most `allowed` pages; 0 if none is needed.

    Args:
        alpha_high, alpha_low: float32 [rows].
    """
    if _pages(store, tokens, alpha_high.numel(), growth) <= allowed:
        return 0.0
    loose, tight = 1e-3, STRONGEST
    for _ in range(SEARCH_STEPS):
        middle = (loose * tight) ** 0.5
        if _pages(store, tokens.below(*_least(alpha_high, alpha_low, middle)), alpha_high.numel(), growth) <= allowed:
            tight = middle
        else:
            loose = middle
    return tight


def _pages(store: Store, tokens: Weighed, rows: int, growth: Growth | None) -> int:
    total = 0
    for tier, (level, layout) in enumerate(((HIGH_LEVEL, store.layout.high), (LOW_LEVEL, store.layout.low))):
        count = torch.bincount(tokens.row[tokens.level == level], minlength=rows)
        count = count if growth is None else count + growth[tier]
        total += int(pages_of(count, layout.capacity).sum())
    return total


def fit_layer(store: Store, layer: int, tokens: Weighed) -> Tensor:
    """Tightens one layer's thresholds until its tokens fit its share of the budget.

    Args:
        tokens: the layer's tokens with the levels the policy gave them.

    Returns:
        Levels that fit, int8 [n].
    """
    free = store.pool.free_list.free + store.pool.max_pages - store.pool.capacity
    rows = store.rows(layer)
    held = sum(int(pages_of(count, tier.capacity).sum()) for count, tier in zip(rows.counts, rows.tiers))
    allowed = held + max(0, int(FILLED_SHARE * free)) // (store.num_layers - layer + store.layers_later)
    alphas = (rows.alpha_high.view(-1), rows.alpha_low.view(-1))
    strength = fit(store, *alphas, tokens, allowed)
    if strength == 0:
        return tokens.level
    _note(store, strength)
    level = tokens.below(*_least(*alphas, strength)).level
    for alpha, fitted in zip(alphas, tightened(*alphas, strength)):
        alpha.copy_(fitted)
    return level


def make_room(store: Store, pages: int, growth: Growth | None = None) -> None:
    """Tightens all thresholds until `pages` pages can be taken, and rewrites every row accordingly.

    Args:
        growth: tokens that need the pages, and would take `pages` of them in empty rows; a row with fewer tokens can
            have less room left in its pages. None if tokens do not matter.

    Raises:
        MemoryError: pruning everything outside the windows would not free enough; nothing has changed.
    """
    limit = store.pool.max_pages - 1
    if pages > limit:
        raise MemoryError(
            f"max_bytes={store.config.max_bytes} leaves room for {limit} pages besides the windows, but {pages} are "
            "needed to continue; raise max_bytes, or lower window or the batch size."
        )
    rows = store.all_rows()
    stored = tuple(stored_tokens(rows, tier) for tier in (HIGH, LOW))
    length = rows.length.repeat_interleave(rows.heads)
    relative = tuple(_relative(rows, stored[tier], tier, length) for tier in (HIGH, LOW))
    alphas = (rows.alpha_high.view(-1), rows.alpha_low.view(-1))
    levels = [torch.full_like(part, level, dtype=torch.int8) for part, level in zip(relative, (HIGH_LEVEL, LOW_LEVEL))]
    held = Weighed(torch.cat([part.row for part in stored]), torch.cat(relative), torch.cat(levels)).below(*alphas)
    allowed = int(FILLED_SHARE * (limit - pages)) + (0 if growth is None else pages)
    strength = fit(store, *alphas, held, allowed, growth)
    _note(store, strength)
    new_alphas = tightened(*alphas, strength)
    high, low = held.below(*new_alphas).level.split([part.numel() for part in relative])
    keep, demoted = (high == HIGH_LEVEL, low != PRUNED_LEVEL), high == LOW_LEVEL
    nothing = no_tokens(store)
    with Changing(store):
        rewrite_rows(store.ops, rows, stored, keep, demoted, (nothing, nothing))
        # in place, because captured steps read them there
        for alpha, tight in zip(alphas, new_alphas):
            alpha.copy_(tight)
        store.forget_bounds()


def _note(store: Store, strength: float) -> None:
    """Records the strength; warns the first time the budget tightens a store's thresholds."""
    if strength and not store.tightening:
        warnings.warn(
            f"max_bytes={store.config.max_bytes} is full: from now on, the least significant tokens are kept at lower "
            "precision or pruned (cache.memory() has the thresholds).",
            stacklevel=2,
        )
    store.tightening = max(store.tightening, strength)


def no_tokens(store: Store) -> NewTokens:
    """Returns an empty set of new tokens."""
    none = torch.zeros(0, dtype=torch.int64, device=store.device)
    score = torch.zeros(0, dtype=torch.float32, device=store.device)
    return NewTokens.of(none, DenseTokens(score.view(0, 1), score.view(0, 1)), score, none)


def _relative(rows: LayerRows, tokens: StoredTokens, tier: int, length: Tensor) -> Tensor:
    """Returns mean * N of stored tokens, float32 [n]."""
    view = segments(rows.pages, rows.tiers[tier])
    score, position = view.scores(tokens.page, tokens.slot), view.positions(tokens.page, tokens.slot)
    return mean_significance(score, position, length[tokens.row]) * length[tokens.row]
