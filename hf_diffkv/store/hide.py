"""Removal of stored tokens that a mask hides: from then on they count as padding, as if never fed.

Pages and windows keep the remaining tokens under new indices. A token's sum is scaled so that its mean stays the same:
the contributions of hidden queries cannot be separated, so the mean over all later queries stands in for theirs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ops.compact import rewrite_rows, stored_tokens, token_positions
from ..pages import HIGH
from ..pages.rows import slots_of
from ..pages.segments import segments
from .budget import no_tokens
from .forks import make_private
from .state import Changing, Store


def hide_tokens(store: Store, shown: Tensor) -> None:
    """Drops every real token that is not shown, in all layers, and frees the pages that become empty.

    Args:
        shown: mask of the tokens to keep, bool [batch, past], a subset of the real tokens; includes recorded tokens.
    """
    make_private(store)
    with Changing(store):
        real = store.padding.mask()
        stored = real.shape[1] - store.revocable
        recorded_and_shown = real[:, stored:] & shown[:, stored:]
        store.recorded = [None if each is None else replace(each, valid=recorded_and_shown) for each in store.recorded]
        moved = _new_indices(real[:, :stored], shown[:, :stored])
        _hide_paged(store, moved)
        _hide_in_windows(store, moved)
        store.padding.replace(shown)
        store.forget_bounds()


def _new_indices(real: Tensor, shown: Tensor) -> Tensor:
    """Returns the new index of each real token among the shown ones, int64 [batch, columns + 1]; -1 if hidden."""
    columns = real.shape[1]
    # padding is scattered to the extra last column
    old = torch.where(real, real.cumsum(1) - 1, columns)
    new = torch.where(shown, shown.cumsum(1) - 1, -1)
    moved = torch.full((real.shape[0], columns + 1), -1, device=real.device)
    moved.scatter_(1, old, new)
    moved[:, columns] = -1
    return moved


def _share(before: Tensor, after: Tensor) -> Tensor:
    """Returns the factor for sums over `before` later queries when `after` of them remain, float32."""
    return after.clamp(min=0).float() / before.clamp(min=1).float()


def _hide_paged(store: Store, moved: Tensor) -> None:
    rows = store.all_rows()
    length = rows.length.repeat_interleave(rows.heads)
    remaining = (moved >= 0).sum(1)
    stored, keep = [], []
    for tier, layout in enumerate(rows.tiers):
        tokens = stored_tokens(rows, tier)
        request = tokens.row // store.num_heads % store.batch_size
        view = segments(store.pool.pages, layout)
        old = token_positions(rows, tier, tokens)
        new = moved[request, old]
        share = _share(length[tokens.row] - 1 - old, remaining[request] - 1 - new)
        view.write_scores(tokens.page, tokens.slot, view.scores(tokens.page, tokens.slot) * share)
        view.write_positions(tokens.page, tokens.slot, new.clamp(min=0))
        stored.append(tokens)
        keep.append(new >= 0)
    nothing = no_tokens(store)
    demoted = torch.zeros_like(keep[HIGH])
    rewrite_rows(store.ops, rows, tuple(stored), tuple(keep), demoted, (nothing, nothing))


def _hide_in_windows(store: Store, moved: Tensor) -> None:
    old = store.all_rows().held_tokens().view(store.num_layers, store.batch_size, -1)
    by_layer = moved.expand(store.num_layers, -1, -1)
    new = by_layer.gather(2, old.clamp(min=0))
    layer, request, place = ((old >= 0) & (new >= 0)).nonzero(as_tuple=True)
    old, new = old[layer, request, place], new[layer, request, place]
    # number of remaining tokens below each index, for each request
    remaining = torch.cat([moved.new_zeros(moved.shape[0], 1), (moved >= 0).cumsum(1)], dim=1)
    remaining = remaining.expand(store.num_layers, -1, -1)
    start, end, length = (
        remaining.gather(2, torch.minimum(index, store.length)[..., None])[..., 0]
        for index in (store.window_start, store.sink_end, store.length)
    )
    # a request with only exact tokens has all its sinks
    whole = start == end
    start, end = (torch.where(whole, store.sink_slots, index) for index in (start, end))
    new_place = slots_of(new, end[layer, request], store.sink_slots, store.window_slots)
    share = _share(store.length[layer, request] - 1 - old, length[layer, request] - 1 - new)
    for state in (store.window_key, store.window_value, store.window_score):
        tokens = state[layer, request, :, place]
        state[layer, request, :, new_place] = tokens * share[:, None] if state is store.window_score else tokens
    store.window_start.copy_(start)
    store.sink_end.copy_(end)
    store.length.copy_(length)
