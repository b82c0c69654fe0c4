"""What the policy, and the byte budget on top of it, make of a layer's tokens after a forward of several tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.compact import NewTokens, StoredTokens
from ..ops.quantize import load_tokens
from ..pages import HIGH, LOW
from ..pages.segments import segments
from ..policy import HIGH_LEVEL, LOW_LEVEL, WINDOW_LEVEL, ForwardRows, Tokens, mean_significance
from .budget import Weighed, fit_layer
from .exact_tokens import is_pinned
from .state import Store


def decide_levels(
    store: Store,
    layer: int,
    stored: tuple[StoredTokens, StoredTokens],
    leaving: NewTokens,
    scores: Sequence[Tensor],
    length: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels of a layer's stored high, stored low and leaving tokens; sets the rows' relative thresholds.

    Args:
        stored: what each tier holds (high, low). leaving: tokens that leave the window.
        scores: float32 sums of both tiers, void where the store selects nothing: all of a head have one level then.
        length: int64 [rows], real tokens seen.

    Returns:
        int8 [n] of each of the three; no stored token rises.
    """
    if not store.layout.selects:
        of_row = torch.where(store.low_heads[layer], LOW_LEVEL, HIGH_LEVEL).to(torch.int8).view(-1)
        return tuple(of_row[row] for row in (stored[HIGH].row, stored[LOW].row, leaving.row))
    tokens = _tokens(store, stored, leaving, scores, length)
    shape = store.alpha_high[layer].shape
    alphas = (store.alpha_high[layer], store.alpha_low[layer])
    start = torch.maximum(store.window_start[layer], store.length[layer] - store.config.window)
    outside = start - store.sink_end[layer]
    rows = ForwardRows(
        store.layers[layer],
        store.total_layers,
        store.head_index.repeat(store.batch_size),
        length,
        outside.repeat_interleave(store.num_heads),
        *(alpha.reshape(-1) for alpha in alphas),
    )
    pinned = is_pinned(store, tokens.position)
    seen = tokens if pinned is None else tokens.select(~pinned)
    decided = store.policy_of(layer).levels(seen, rows)
    for alpha, changed in zip(alphas, (decided.alpha_high, decided.alpha_low)):
        if changed is not None:
            alpha.copy_(changed.view(shape))
    earned = decided.level
    if pinned is not None:
        earned = torch.full_like(tokens.level, HIGH_LEVEL).masked_scatter(~pinned, earned)
    level = torch.minimum(earned, tokens.level)
    if store.config.max_bytes is not None:
        level = fit_layer(store, layer, Weighed(tokens.row, tokens.mean * length[tokens.row], level))
    return level.split([part.row.numel() for part in (*stored, leaving)])


def _tokens(
    store: Store,
    stored: tuple[StoredTokens, StoredTokens],
    leaving: NewTokens,
    scores: Sequence[Tensor],
    length: Tensor,
) -> Tokens:
    rows, positions, norms = [], [], []
    for tier, layout in ((HIGH, store.layout.high), (LOW, store.layout.low)):
        page, slot = stored[tier].page, stored[tier].slot
        rows.append(stored[tier].row)
        positions.append(segments(store.pool.pages, layout).positions(page, slot).long())
        if store.policy.needs_value_norm:
            _, value = load_tokens(store.pool.pages, layout, page, slot, store.dtype)
            norms.append(value.float().norm(dim=-1))
    if store.policy.needs_value_norm:
        norms.append(leaving.value_norm())
    rows.append(leaving.row)
    levels = [torch.full_like(row, n, dtype=torch.int8) for row, n in zip(rows, (HIGH_LEVEL, LOW_LEVEL, WINDOW_LEVEL))]
    row, position = torch.cat(rows), torch.cat([*positions, leaving.position])
    return Tokens(
        row,
        mean_significance(torch.cat([*scores, leaving.score]), position, length[row]),
        position,
        torch.cat(levels),
        torch.cat(norms) if store.policy.needs_value_norm else None,
    )
