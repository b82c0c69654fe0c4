"""Keeping a store under `max_bytes` by tightening its thresholds.

Tightening by `strength` raises alpha_high to at least `strength` and alpha_low to at least a tenth of it (where a
head has no low tier: to the same), so that the least significant tokens sink first and are pruned first. Thresholds
never go back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import HIGH, LOW
from ..ops.compact import NewTokens, StoredTokens, rewrite_rows, stored_tokens
from ..ops.segments import segments
from ..policy import mean_significance
from .state import Store

LOW_SHARE = 0.1
SEARCH_STEPS = 24
STRONGEST = 1e6
# after tightening this share of the pages is in use, so that it is needed seldom
TARGET = 0.9


@dataclass(frozen=True)
class Tokens:
    """Tokens whose levels are to be decided: row int64 [n] and relative significance mean * N float32 [n].

    `lowest`: bool [n], those that are at the low level already and cannot rise.
    """

    row: Tensor
    relative: Tensor
    lowest: Tensor


def tightened(alpha_high: Tensor, alpha_low: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Both thresholds, float32 of any one shape, tightened."""
    share = torch.where(alpha_low < alpha_high, LOW_SHARE, 1.0)
    high = alpha_high.clamp(min=strength)
    return high, torch.minimum(torch.maximum(alpha_low, share * strength), high)


def fit(
    store: Store, alpha_high: Tensor, alpha_low: Tensor, tokens: Tokens, rows: int, allowed: int
) -> tuple[Tensor, Tensor]:
    """The loosest tightening of thresholds (float32 [rows]) under which `tokens` take at most `allowed` pages."""
    if _pages(store, alpha_high, alpha_low, tokens, rows) <= allowed:
        return alpha_high, alpha_low
    loose, tight = 1e-3, STRONGEST
    for _ in range(SEARCH_STEPS):
        middle = (loose * tight) ** 0.5
        if _pages(store, *tightened(alpha_high, alpha_low, middle), tokens, rows) <= allowed:
            tight = middle
        else:
            loose = middle
    return tightened(alpha_high, alpha_low, tight)


def _pages(store: Store, alpha_high: Tensor, alpha_low: Tensor, tokens: Tokens, rows: int) -> int:
    high = (tokens.relative >= alpha_high[tokens.row]) & ~tokens.lowest
    low = (tokens.relative >= alpha_low[tokens.row]) & ~high
    total = 0
    for chosen, layout in ((high, store.layout.high), (low, store.layout.low)):
        count = torch.bincount(tokens.row[chosen], minlength=rows)
        total += int(((count + layout.capacity - 1) // layout.capacity).sum())
    return total


def fit_layer(store: Store, layer: int, rows: list[Tensor], means: list[Tensor], length: Tensor) -> None:
    """Tightens one layer's thresholds until its tokens fit its share of the budget.

    Args:
        rows, means: of the stored high, the stored low, and the new tokens that leave the window.
        length: int64 [rows], real tokens seen.
    """
    free = store.pool.free_list.free + store.pool.max_pages - store.pool.capacity
    capacities = (store.layout.high.capacity, store.layout.low.capacity)
    counts = (store.high_count[layer], store.low_count[layer])
    held = sum(int(((count + size - 1) // size).sum()) for count, size in zip(counts, capacities))
    allowed = held + max(0, int(TARGET * free)) // (store.num_layers - layer + store.layers_later)
    tokens = Tokens(
        torch.cat(rows),
        torch.cat([mean * length[row] for mean, row in zip(means, rows)]),
        torch.cat([torch.full_like(row, tier == LOW, dtype=torch.bool) for tier, row in enumerate(rows)]),
    )
    shape = store.high_count[layer].shape
    alphas = (alpha[layer].expand(shape).reshape(-1) for alpha in (store.alpha_high, store.alpha_low))
    fitted = fit(store, *alphas, tokens, store.rows_per_layer, allowed)
    store.alpha_high[layer], store.alpha_low[layer] = (alpha.view(shape)[0] for alpha in fitted)


def make_room(store: Store, pages: int) -> None:
    """Tightens all thresholds until `pages` pages can be taken, and rewrites every row by them.

    Raises:
        MemoryError: not even pruning everything outside the windows would do; nothing has changed then.
    """
    limit = store.pool.max_pages - 1
    if pages > limit:
        raise MemoryError(
            f"max_bytes={store.config.max_bytes} leaves room for {limit} pages beside the windows, but {pages} are "
            "needed to go on; raise max_bytes, or lower window or the batch size."
        )
    rows = store.num_layers * store.rows_per_layer
    table = store.table.table.view(rows, -1)
    counts = (store.high_count.view(rows), store.low_count.view(rows))
    layouts = (store.layout.high, store.layout.low)
    stored = tuple(stored_tokens(table, counts[tier], tier, layouts[tier]) for tier in (HIGH, LOW))
    shape = store.high_count.shape
    length = store.length[..., None].expand(shape).reshape(rows)
    relative = tuple(_relative(store, stored[tier], tier, length) for tier in (HIGH, LOW))
    alpha_high, alpha_low = (
        alpha[:, None].expand(shape).reshape(rows) for alpha in (store.alpha_high, store.alpha_low)
    )
    tokens = Tokens(
        torch.cat([stored[HIGH].row, stored[LOW].row]),
        torch.cat(relative),
        torch.arange(sum(r.numel() for r in relative), device=store.device) >= relative[HIGH].numel(),
    )
    allowed = int(TARGET * (limit - pages))
    alpha_high, alpha_low = fit(store, alpha_high, alpha_low, tokens, rows, allowed)
    stays = relative[HIGH] >= alpha_high[stored[HIGH].row]
    demoted = ~stays & (relative[HIGH] >= alpha_low[stored[HIGH].row])
    keep = (stays, relative[LOW] >= alpha_low[stored[LOW].row])
    nothing = no_tokens(store)
    rewrite_rows(store.pool, store.layout, table, *counts, stored, keep, demoted, (nothing, nothing), store.dtype)
    # where they stand, as captured steps read them there
    store.alpha_high.copy_(alpha_high.view(shape)[:, 0])
    store.alpha_low.copy_(alpha_low.view(shape)[:, 0])
    store.forget_bounds()


def no_tokens(store: Store) -> NewTokens:
    """Nothing to add to a row."""
    return NewTokens(
        torch.zeros(0, dtype=torch.int64, device=store.device),
        torch.zeros(0, store.key_dim, dtype=store.dtype, device=store.device),
        torch.zeros(0, store.value_dim, dtype=store.dtype, device=store.device),
        torch.zeros(0, device=store.device),
        torch.zeros(0, dtype=torch.int64, device=store.device),
    )


def _relative(store: Store, tokens: StoredTokens, tier: int, length: Tensor) -> Tensor:
    """mean * N of stored tokens, float32 [n]."""
    view = segments(store.pool.pages, (store.layout.high, store.layout.low)[tier])
    score, position = view.score[tokens.page, tokens.slot], view.position[tokens.page, tokens.slot]
    return mean_significance(score, position, length[tokens.row]) * length[tokens.row]
