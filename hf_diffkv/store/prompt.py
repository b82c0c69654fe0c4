"""Several new tokens at once: a prompt, a further turn or a chunk.

Attention among the new tokens is exact. Then the policy decides the levels of the whole layer. A layer that reads the
tokens of an earlier one may attend from only the newest tokens, because models drop the tokens that need no logits. The
attention that keys received from them is scaled up to all later queries, as with `observation_window`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.compact import DenseTokens, NewTokens, StoredTokens, rewrite_rows, stored_tokens, token_positions
from ..ops.latent_prompt import with_absorbed_queries
from ..ops.softmax import Softmax
from ..pages import HIGH, HIGH_LEVEL, LOW, LOW_LEVEL, PRUNED_LEVEL, WINDOW_LEVEL, EarlierTokens, LayerRows
from ..pages.segments import score_noise, segments
from ..policy import ForwardRows, Tokens, mean_significance
from .budget import Weighed, fit_layer
from .lowering import make_room_for_prompt
from .prompt_kernels import PromptPlan, store_by_kernels
from .state import Changing, Store
from .transform import (
    NewPrompt,
    PromptSource,
    check_finite,
    feedback,
    model_form,
    query_form,
    query_moment,
)


def admitted(store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None) -> NewPrompt:
    """Returns a layer's new tokens after checking them and, with `until_full`, making room for them.

    Raises:
        ValueError: keys or values are not finite.
        MemoryError: the tokens do not fit into `max_bytes` with `until_full`; nothing has changed.
    """
    if not store.stores_by_kernel:
        # kernels check them themselves
        check_finite(store, key, value, valid)
    if store.lowering.active:
        make_room_for_prompt(store, key.shape[2], valid)
    return NewPrompt(store, layer, key, value, valid)


class PromptAttention:
    """Several new tokens of a layer, to which that layer and perhaps later ones attend.

    The queries of reader layers count as further query heads of the KV head: a token's sum gains the maximum over all
    of them. The tokens are therefore compressed once the last of these layers has attended.

    Args:
        layer: index of the layer within the store.
        key, value: key and value states, [batch, heads, Q, dim].
        valid: True for real tokens, bool [batch, Q]; None if all are.
        mask: attention mask among the new tokens, bool [batch, 1, Q, Q]; None is causal.

    Raises:
        ValueError: keys or values are not finite; nothing has changed. With `Store.stores_by_kernel` it is raised by
            the next look at the device instead.
    """

    def __init__(
        self,
        store: Store,
        layer: int,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self._store, self._layer = store, layer
        self._new, self._mask = admitted(store, layer, key, value, valid), mask
        self._received: Tensor | None = None
        self._moment: Tensor | None = None

    def attend(self, query: Tensor, softmax: Softmax, last: bool = True) -> Tensor:
        """Attends over the stored tokens and the new ones, and compresses the layer after the last reader.

        Args:
            query: query states of all tokens or of the newest ones, [batch, query_heads, n, key_dim].
            last: whether no further layer reads these tokens.

        Returns:
            Attention output, [batch, query_heads, n, value_dim] in the query's dtype.

        Raises:
            MemoryError: the compressed tokens do not fit; this layer is unchanged.
        """
        store, layer = self._store, self._layer
        past = StoredPast.read(store, layer, self._new)
        output, received = self._attend(past, query, softmax)
        if received is not None:
            self._received = received if self._received is None else torch.maximum(self._received, received)
        moment = query_moment(store, query, self._new.valid)
        self._moment = moment if self._moment is None else self._moment + moment
        if last:
            noted, more = store.lowering.moments, None
            if noted is not None and self._moment is not None:
                # summed here, so that memory cannot run out when the prompt is stored
                more = self._moment.unflatten(0, (store.batch_size, store.num_heads)).sum(0)
            compress(store, layer, past, self._new, self._received, self._moment)
            if more is not None:
                noted[layer] += more
        return output

    def _attend(self, past: StoredPast, query: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
        """Returns what `attend_from_newest` returns."""
        return attend_from_newest(self._store, self._layer, past, query, self._new, self._mask, softmax)


def attend_from_newest(
    store: Store, layer: int, past: StoredPast, query: Tensor, new: NewPrompt, mask: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor | None]:
    """Attends from the newest n of the Q new tokens over a layer's past and all new tokens; changes nothing.

    Args:
        query: query states, [batch, query_heads, n, key_dim]. With n < Q, all n must see the same earlier tokens.
        mask: attention mask among the new tokens, bool [batch, 1, Q, Q]; None is causal.

    Returns:
        The attention output, [batch, query_heads, n, value_dim], and the attention each key received, as
        `attend_with_past` returns it.
    """
    (key, value), valid = new.attended_with(past.earlier), new.valid
    before, earlier = past.earlier, key.shape[2] - query.shape[2]
    if earlier:
        shown = torch.ones(key.shape[0], earlier, dtype=torch.bool, device=key.device)
        shown = shown if valid is None else shown & valid[:, :earlier]
        shown = shown if mask is None else shown & mask[:, 0, -1, :earlier]
        exact = {"key": key[:, :, :earlier], "value": value[:, :, :earlier]}
        before = replace(before, **exact, valid=shown[:, None].expand(-1, key.shape[1], -1))
        key, value = key[:, :, earlier:], value[:, :, earlier:]
        valid = None if valid is None else valid[:, earlier:]
        mask = None if mask is None else mask[..., earlier:, earlier:]
    output, received = attend_with_past(store, layer, before, query, key, value, softmax, valid=valid, mask=mask)
    if earlier and received is not None:
        received = received * _later_share(new, earlier, received.shape[-1])[:, None]
    return output, received


def _later_share(new: NewPrompt, earlier: int, columns: int) -> Tensor:
    """Returns, for each of the P + Q keys, the ratio of all later queries to those that attended.

    The queries that attended are those after the first `earlier` new tokens.

    Returns:
        Ratios, float32 [batch, columns] with `columns` = P + Q.
    """
    key, valid = new.key, new.valid
    if valid is None:
        valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    later = valid.flip(-1).cumsum(-1).flip(-1) - valid.long()
    there = valid[:, earlier:].sum(-1, keepdim=True)
    follow = torch.cat([valid.sum(-1, keepdim=True).expand(-1, columns - key.shape[2]), later], dim=-1)
    share = follow.float() / there.clamp(min=1).float()
    # for these keys, all later queries attended
    share[:, columns - key.shape[2] + earlier :] = 1.0
    return share


def attend_with_past(
    store: Store,
    layer: int,
    past: EarlierTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    *,
    valid: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs `prefill_attention` from Q new tokens over the P earlier ones and themselves; does not change the store.

    Args:
        query: query states of the model, [batch, query_heads, Q, key_dim].
        key, value: keys and values from `NewPrompt.attended_with`, [batch, heads, Q, dim].
        valid, mask: arguments of `prefill_attention`.

    Returns:
        The attention output, and the attention each key received, float32 [batch, heads, P + Q]; the latter is None if
        the store selects no tokens.
    """
    store.note_logits(layer, softmax)
    query = query if past.rows is None else query_form(store, query)
    attention = store.ops.prefill_attention
    attention = with_absorbed_queries(attention) if store.heads.latent else attention
    options = {"past": past, "valid": valid, "mask": mask, "observed": store.observation_window}
    output, received = attention(query, key, value, softmax, **options)
    received = None if received is None else received.float()
    return output if past.rows is None else model_form(store, output), received


class StoredPast:
    """A layer's tokens before a forward, and the rank of each within its row."""

    def __init__(self) -> None:
        self.tokens: tuple[StoredTokens, StoredTokens]
        self.earlier = EarlierTokens()
        # row and rank of each part's tokens: high, low, window
        self.ranks: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def read(cls, store: Store, layer: int, new: NewPrompt) -> StoredPast:
        """Reads the layer's state before `new` is stored."""
        past = cls()
        if store.stores_by_kernel:
            longest = PromptPlan.of(store, layer, new).longest[layer]
        else:
            longest = past.find_tokens(store, layer)
        if longest > 0:
            past.earlier = EarlierTokens(store.rows(layer), longest)
        return past

    def find_tokens(self, store: Store, layer: int) -> int:
        """Lists every token and returns the length of the longest row."""
        rows = store.rows(layer)
        high, low = self.tokens = tuple(stored_tokens(rows, tier) for tier in (HIGH, LOW))
        self.window_row, self.window_token = rows.exact_tokens()
        high_count, low_count = (count.view(-1).long() for count in rows.counts)
        outside_window = high_count + low_count
        window_count = rows.held_count().repeat_interleave(rows.heads)
        longest = int((outside_window + window_count).max())
        if longest > 0:
            index = torch.arange(self.window_row.numel(), device=rows.device)
            first = window_count.cumsum(0) - window_count
            self.ranks = [
                (high.row, high.index),
                (low.row, low.index + high_count[low.row]),
                (self.window_row, index + (outside_window - first)[self.window_row]),
            ]
        return longest

    def gather(self, received: Tensor, part: int) -> Tensor:
        """Returns this forward's contribution to the sums of one part's tokens.

        Args:
            received: attention received by each key, [rows, P + Q].
            part: 0 for high, 1 for low, 2 for the window.
        """
        return received[self.ranks[part]] if self.ranks else received.new_zeros(0)


def compress(
    store: Store, layer: int, past: StoredPast, new: NewPrompt, received: Tensor | None, moment: Tensor | None
) -> None:
    """Updates the sums and decides the levels of new and earlier tokens.

    Args:
        received: attention received by each key, as `attend_with_past` returns it.
        moment: second moment of the queries that keys are rounded for, as `query_moment` returns it.

    Raises:
        MemoryError: the tokens do not fit; the layer is unchanged.
    """
    if store.stores_by_kernel:
        if store_by_kernels(store, layer, new, received, feedback(store, moment)):
            return
        check_finite(store, new.key, new.value, new.valid)
        past.find_tokens(store, layer)
    source, offset = new.stored()
    received = None if received is None else received.flatten(0, 1)
    rows, new_count = store.rows(layer), new.key.shape[2]
    store.ensure_width(int((rows.high_count + rows.low_count).max()) + new_count + rows.slots)
    store.update_limit()
    # the table may have moved
    rows = store.rows(layer)
    old_length, old_alphas = rows.length.clone(), (rows.alpha_high.clone(), rows.alpha_low.clone())
    previous: list[Tensor] = []
    scores: list[Tensor] = []
    rewrites = False
    with Changing(store):
        try:
            rows.length.add_(new_count if new.valid is None else new.valid.sum(-1))
            length = rows.length.repeat_interleave(rows.heads)
            if received is not None:
                for tier, layout in enumerate(rows.tiers):
                    tokens = past.tokens[tier]
                    previous.append(segments(rows.pages, layout).scores(tokens.page, tokens.slot))
                    scores.append(previous[tier] + past.gather(received, tier))
            exact = _exact_tokens(rows, past, source, new.valid, offset, old_length, received)
            start = torch.maximum(rows.window_start, rows.length - store.config.window)
            request = exact.row // rows.heads
            in_window = (exact.position < rows.sink_end[request]) | (exact.position >= start[request])
            leaving, window = exact.select(~in_window), exact.select(in_window)
            levels = decide_levels(store, layer, past.tokens, leaving, scores, length)
            keep = (levels[HIGH] == HIGH_LEVEL, levels[LOW] != PRUNED_LEVEL)
            arriving = (leaving.select(levels[2] == HIGH_LEVEL), leaving.select(levels[2] == LOW_LEVEL))
            demoted, matrices = levels[HIGH] == LOW_LEVEL, feedback(store, moment)
            _write_scores(rows, past, scores, length)
            rewrites = True
            rewrite_rows(store.ops, rows, past.tokens, keep, demoted, arriving, matrices)
        except BaseException as error:
            # `rewrite_rows` raises a MemoryError before it changes anything, other errors at any point
            if not rewrites or isinstance(error, MemoryError):
                _write_scores(rows, past, previous)
                for tensor, old in zip((rows.length, rows.alpha_high, rows.alpha_low), (old_length, *old_alphas)):
                    tensor.copy_(old)
                store.unfinished -= 1
            raise
        if offset is not None:
            rows.key_offset.copy_(offset)
        _fill_window(rows, window)
        rows.window_start.copy_(start)
        store.forget_bounds()


def _write_scores(rows: LayerRows, past: StoredPast, scores: list[Tensor], length: Tensor | None = None) -> None:
    """Writes the significance sums of stored tokens.

    Args:
        scores: new sums of the high and the low tier, float32 [n] each.
        length: new length of the rows, int64 [rows], which seeds the rounding; None to restore sums that were read.
    """
    for tier, score in enumerate(scores):
        tokens = past.tokens[tier]
        noise = None if length is None else score_noise(tokens.index, length[tokens.row], tier)
        segments(rows.pages, rows.tiers[tier]).write_scores(tokens.page, tokens.slot, score, noise)


def _exact_tokens(
    rows: LayerRows,
    past: StoredPast,
    source: PromptSource,
    valid: Tensor | None,
    offset: Tensor | None,
    old_length: Tensor,
    received: Tensor | None,
) -> NewTokens:
    """Returns all exact tokens, those of the window and the new ones, sorted by row, then position.

    Args:
        source: the new tokens.
        offset: new key offset of all rows, as `NewPrompt.stored` returns it.
        received: attention received by each key, [rows, P + Q]; None if sums do not grow.
    """
    new_count = source.key.shape[2]
    place = past.window_row, rows.slots_of(past.window_row, past.window_token)
    states = (rows.window_key, rows.window_value, rows.window_score)
    held_key, held_value, score = (state.flatten(0, 1)[place] for state in states)
    if received is not None:
        score = score + past.gather(received, 2)
    if offset is not None:
        shift = (offset - rows.key_offset).flatten(0, 1)[past.window_row]
        held_key = (held_key - shift).to(held_key.dtype)
    window = NewTokens.of(past.window_row, DenseTokens(held_key, held_value), score, past.window_token)
    if valid is None:
        valid = torch.ones(rows.batch, new_count, dtype=torch.bool, device=rows.device)
    position = old_length[:, None] + valid.cumsum(-1) - 1
    row, column = valid.repeat_interleave(rows.heads, dim=0).nonzero(as_tuple=True)
    if received is None:
        new_score = torch.zeros(row.shape, dtype=torch.float32, device=rows.device)
    else:
        new_score = received[row, received.shape[1] - new_count + column]
    new_position = position[row // rows.heads, column]
    return window.merge(NewTokens(row, new_score, new_position, (source,), row * new_count + column))


def _fill_window(rows: LayerRows, tokens: NewTokens) -> None:
    slot = rows.slots_of(tokens.row, tokens.position)
    key, value = tokens.read(slice(None))
    states = (rows.window_key, rows.window_value, rows.window_score)
    for state, given in zip(states, (key, value, tokens.score)):
        state.flatten(0, 1)[tokens.row, slot] = given.to(state.dtype)


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
    rows = store.rows(layer)
    row = torch.cat([stored[HIGH].row, stored[LOW].row, leaving.row])
    position = torch.cat([*(token_positions(rows, tier, stored[tier]) for tier in (HIGH, LOW)), leaving.position])
    parts = zip((*stored, leaving), (HIGH_LEVEL, LOW_LEVEL, WINDOW_LEVEL))
    level = torch.cat([torch.full_like(part.row, level, dtype=torch.int8) for part, level in parts])
    mean = mean_significance(torch.cat([*scores, leaving.score]), position, length[row])
    tokens = Tokens(row, mean, position, level)
    alphas = (rows.alpha_high.view(-1), rows.alpha_low.view(-1))
    start = torch.maximum(rows.window_start, rows.length - store.config.window)
    outside = (start - rows.sink_end).repeat_interleave(rows.heads)
    state = ForwardRows(store.layers[layer], store.total_layers, length, outside, *alphas)
    decided = store.policy.levels(tokens, state)
    for alpha, changed in zip(alphas, (decided.alpha_high, decided.alpha_low)):
        if changed is not None:
            alpha.copy_(changed)
    level = torch.minimum(decided.level, tokens.level)
    if store.config.max_bytes is not None:
        level = fit_layer(store, layer, Weighed(tokens.row, tokens.mean * length[tokens.row], level))
    return level.split([part.row.numel() for part in (*stored, leaving)])
