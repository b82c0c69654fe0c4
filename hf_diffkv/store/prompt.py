"""Several new tokens at once: a prompt, a further turn or a chunk.

Attention among the new tokens is exact. Afterwards the policy decides the levels of the whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.compact import Given, NewTokens, StoredTokens, rewrite_rows, stored_tokens
from ..ops.prefill_attention import prefill_attention
from ..ops.softmax import Softmax
from ..pages import HIGH, HIGH_LEVEL, LOW, LOW_LEVEL, PRUNED_LEVEL, WINDOW_LEVEL, EarlierTokens
from ..pages.segments import score_noise, segments
from ..policy import ForwardRows, Tokens, mean_significance
from .budget import Weighed, fit_layer
from .forms import (
    Entering,
    PromptSource,
    check_finite,
    feedback,
    held_count,
    model_form,
    note_logits,
    query_form,
    query_moment,
    slots_of,
)
from .lowering import make_room_for_prompt, note_queries
from .prompt_kernels import Forward, store_by_kernels
from .state import Store


def attend_tokens(
    store: Store,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attends from Q new tokens over the stored tokens and themselves, then compresses the layer.

    Args:
        layer: index of the layer within the store.
        query: query states, [batch, query_heads, Q, key_dim].
        key, value: key and value states, [batch, heads, Q, dim].
        valid: True for real tokens, bool [batch, Q]; None if all are.
        mask: attention mask among the new tokens, bool [batch, 1, Q, Q]; None is causal.

    Returns:
        Attention output, [batch, query_heads, Q, value_dim] in the query's dtype.

    Raises:
        ValueError: keys or values are not finite; nothing has changed. With `Store.enters_at_once` it is raised by the
            next look at the device instead.
        MemoryError: the compressed tokens do not fit; this layer is unchanged.
    """
    new = Entering.checked(store, layer, key, value, valid)
    if store.lowering.active:
        make_room_for_prompt(store, key.shape[2], valid)
    past = Past.read(store, layer, new)
    options = {"valid": valid, "mask": mask, "observed": store.observation_window}
    output, received = attend_beside(store, layer, past.earlier, query, *new.beside(past.earlier), softmax, **options)
    compress(store, layer, past, new, received, query_moment(store, query, valid))
    return output


def attend_beside(
    store: Store,
    layer: int,
    past: EarlierTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs `prefill_attention` from Q new tokens over the P earlier ones and themselves; does not change the store.

    Args:
        query: query states of the model, [batch, query_heads, Q, key_dim].
        key, value: keys and values from `Entering.beside`, [batch, heads, Q, dim].

    Returns:
        The attention output, and the attention each key received, float32 [batch, heads, P + Q]; the latter is None if
        the store selects no tokens.
    """
    note_logits(store, layer, softmax)
    if not store.layout.selects:
        options["observed"] = 0
    query = query if past.rows is None else query_form(store, query)
    output, received = prefill_attention(query, key, value, softmax, past=past, **options)
    received = None if received is None else received.float()
    return output if past.rows is None else model_form(store, output), received


class Past:
    """A layer's tokens before a forward, and the rank of each within its row."""

    def __init__(self) -> None:
        self.tokens: tuple[StoredTokens, StoredTokens]
        self.earlier = EarlierTokens()
        # row and rank of each part's tokens: high, low, window
        self.ranks: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def read(cls, store: Store, layer: int, new: Entering) -> Past:
        """Reads the layer's state before `new` is stored."""
        past = cls()
        if store.enters_at_once:
            longest = Forward.of(store, layer, new).longest[layer]
        else:
            longest = past.find_tokens(store, layer)
        if longest > 0:
            past.earlier = EarlierTokens(store.rows(layer), longest)
        return past

    def find_tokens(self, store: Store, layer: int) -> int:
        """Lists every token and returns the length of the longest row."""
        rows = store.batch_size * store.num_heads
        counts = [store.high_count[layer].view(rows), store.low_count[layer].view(rows)]
        self.tokens = tuple(stored_tokens(store.rows(layer), tier) for tier in (HIGH, LOW))
        self.window_row, self.window_token, window_rank = _window_tokens(store, layer)
        window_count = torch.bincount(self.window_row, minlength=rows)
        longest = int((counts[HIGH] + counts[LOW] + window_count).max())
        if longest > 0:
            high, low = self.tokens
            outside_window = (counts[HIGH] + counts[LOW]).long()
            self.ranks = [
                (high.row, high.index),
                (low.row, low.index + counts[HIGH].long()[low.row]),
                (self.window_row, window_rank + outside_window[self.window_row]),
            ]
        return longest

    def gather(self, received: Tensor, part: int) -> Tensor:
        """Returns this forward's contribution to the sums of one part's tokens.

        Args:
            received: attention received by each key, [rows, P + Q].
            part: 0 for high, 1 for low, 2 for the window.
        """
        return received[self.ranks[part]] if self.ranks else received.new_zeros(0)


def _window_tokens(store: Store, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns row, token index and rank of each token in a layer's window, sorted by row, then index."""
    start, end = store.window_start[layer], store.sink_end[layer]
    count = held_count(store, layer).repeat_interleave(store.num_heads)
    row = torch.repeat_interleave(torch.arange(count.numel(), device=store.device), count)
    rank = torch.arange(row.numel(), device=store.device) - (count.cumsum(0) - count)[row]
    request = row // store.num_heads
    return row, torch.where(rank < end[request], rank, rank + (start - end)[request]), rank


def window_slot(store: Store, layer: int, row: Tensor, position: Tensor) -> Tensor:
    """Returns the window slots of exact tokens, given their rows within the layer."""
    return slots_of(store, position, store.sink_end[layer][row // store.num_heads])


def compress(
    store: Store, layer: int, past: Past, new: Entering, received: Tensor | None, moment: Tensor | None
) -> None:
    """Updates the sums and decides the levels of new and earlier tokens.

    Args:
        received: attention received by each key, as `attend_beside` returns it.
        moment: second moment of the queries that keys are rounded for, as `query_moment` returns it.

    Raises:
        MemoryError: the tokens do not fit; the layer is unchanged.
    """
    if store.lowering.active:
        note_queries(store, layer, moment)
    if store.enters_at_once:
        if store_by_kernels(store, layer, new, received, feedback(store, moment)):
            return
        check_finite(store, new.key, new.value, new.valid)
        past.find_tokens(store, layer)
    heads = store.num_heads
    valid, new_count = new.valid, new.key.shape[2]
    source, offset = new.stored()
    received = None if received is None else received.flatten(0, 1)
    old_length = store.length[layer].clone()
    longest = int((store.high_count[layer] + store.low_count[layer]).max()) + new_count + store.window_slots
    store.ensure_width(longest)
    store.update_limit()
    old_alphas = store.alpha_high[layer].clone(), store.alpha_low[layer].clone()
    store.length[layer] += new_count if valid is None else valid.sum(-1)
    length = store.length[layer].repeat_interleave(heads)
    pages = store.pool.pages

    previous, scores = [], []
    if received is not None:
        for tier, layout in ((HIGH, store.layout.high), (LOW, store.layout.low)):
            tokens = past.tokens[tier]
            previous.append(segments(pages, layout).scores(tokens.page, tokens.slot))
            scores.append(previous[tier] + past.gather(received, tier))
    candidates = _candidates(store, layer, past, source, valid, offset, old_length, received)
    start = torch.maximum(store.window_start[layer], store.length[layer] - store.config.window)
    request = candidates.row // heads
    in_window = (candidates.position < store.sink_end[layer][request]) | (candidates.position >= start[request])
    leaving, window = candidates.select(~in_window), candidates.select(in_window)
    levels = decide_levels(store, layer, past.tokens, leaving, scores, length)
    keep = (levels[HIGH] == HIGH_LEVEL, levels[LOW] != PRUNED_LEVEL)
    arriving = (leaving.select(levels[2] == HIGH_LEVEL), leaving.select(levels[2] == LOW_LEVEL))

    try:
        _write_scores(store, past, scores, length)
        demoted = levels[HIGH] == LOW_LEVEL
        rewrite_rows(store.rows(layer), past.tokens, keep, demoted, arriving, feedback(store, moment))
    except MemoryError:
        _write_scores(store, past, previous)
        store.length[layer] = old_length
        store.alpha_high[layer], store.alpha_low[layer] = old_alphas
        raise
    if offset is not None:
        store.key_offset[layer] = offset
    _fill_window(store, layer, window)
    store.window_start[layer] = start
    store.forget_bounds()


def _write_scores(store: Store, past: Past, scores: list[Tensor], length: Tensor | None = None) -> None:
    """Writes the significance sums of stored tokens.

    Args:
        scores: new sums of the high and the low tier, float32 [n] each.
        length: new length of the rows, int64 [rows], which seeds the rounding; None to restore sums that were read.
    """
    for tier, score in enumerate(scores):
        layout, tokens = (store.layout.high, store.layout.low)[tier], past.tokens[tier]
        noise = None if length is None else score_noise(tokens.index, length[tokens.row], tier)
        segments(store.pool.pages, layout).write_scores(tokens.page, tokens.slot, score, noise)


def _candidates(
    store: Store,
    layer: int,
    past: Past,
    source: PromptSource,
    valid: Tensor | None,
    offset: Tensor | None,
    old_length: Tensor,
    received: Tensor | None,
) -> NewTokens:
    """Returns all exact tokens, those of the window and the new ones, sorted by row, then position.

    Args:
        source: the new tokens.
        offset: new key offset of all rows, as `Entering.stored` returns it.
        received: attention received by each key, [rows, P + Q]; None if sums do not grow.
    """
    heads, new_count = store.num_heads, source.key.shape[2]
    place = past.window_row, window_slot(store, layer, past.window_row, past.window_token)
    states = (store.window_key, store.window_value, store.window_score)
    held_key, held_value, score = (state[layer].flatten(0, 1)[place] for state in states)
    if received is not None:
        score = score + past.gather(received, 2)
    if offset is not None:
        shift = (offset - store.key_offset[layer]).flatten(0, 1)[past.window_row]
        held_key = (held_key - shift).to(held_key.dtype)
    window = NewTokens.of(past.window_row, Given(held_key, held_value), score, past.window_token)
    if valid is None:
        valid = torch.ones(store.batch_size, new_count, dtype=torch.bool, device=store.device)
    position = old_length[:, None] + valid.cumsum(-1) - 1
    row, column = valid.repeat_interleave(heads, dim=0).nonzero(as_tuple=True)
    if received is None:
        new_score = torch.zeros(row.shape, device=store.device)
    else:
        new_score = received[row, received.shape[1] - new_count + column]
    new_position = position[row // heads, column]
    return window.merge(NewTokens(row, new_score, new_position, (source,), row * new_count + column))


def _fill_window(store: Store, layer: int, tokens: NewTokens) -> None:
    slot = window_slot(store, layer, tokens.row, tokens.position)
    key, value = tokens.read(slice(None))
    states = (store.window_key, store.window_value, store.window_score)
    for state, given in zip(states, (key, value, tokens.score)):
        state[layer].flatten(0, 1)[tokens.row, slot] = given.to(state.dtype)


def decide_levels(
    store: Store,
    layer: int,
    stored: tuple[StoredTokens, StoredTokens],
    leaving: NewTokens,
    scores: Sequence[Tensor],
    length: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decides the levels of stored and leaving tokens, and sets the rows' relative thresholds.

    Args:
        stored: stored tokens of each tier (high, low).
        leaving: tokens that leave the window.
        scores: sums of both tiers, float32; empty if the store selects no tokens. All tokens of a head then have the
            same level.
        length: real tokens seen, int64 [rows].

    Returns:
        Levels of the stored high, the stored low and the leaving tokens, int8 [n] each. No stored token is promoted.
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
        length,
        outside.repeat_interleave(store.num_heads),
        *(alpha.reshape(-1) for alpha in alphas),
    )
    decided = store.policy.levels(tokens, rows)
    for alpha, changed in zip(alphas, (decided.alpha_high, decided.alpha_low)):
        if changed is not None:
            alpha.copy_(changed.view(shape))
    level = torch.minimum(decided.level, tokens.level)
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
    rows, positions = [], []
    for tier, layout in ((HIGH, store.layout.high), (LOW, store.layout.low)):
        page, slot = stored[tier].page, stored[tier].slot
        rows.append(stored[tier].row)
        positions.append(segments(store.pool.pages, layout).positions(page, slot).long())
    rows.append(leaving.row)
    levels = [torch.full_like(row, n, dtype=torch.int8) for row, n in zip(rows, (HIGH_LEVEL, LOW_LEVEL, WINDOW_LEVEL))]
    row, position = torch.cat(rows), torch.cat([*positions, leaving.position])
    return Tokens(
        row,
        mean_significance(torch.cat([*scores, leaving.score]), position, length[row]),
        position,
        torch.cat(levels),
    )
