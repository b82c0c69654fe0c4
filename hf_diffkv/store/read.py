"""Read access to a store. The only change it makes is to run a pending compaction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.compact import stored_tokens, token_positions
from ..pages import HIGH, HIGH_LEVEL, LOW, LOW_LEVEL, NULL_PAGE, PADDING_LEVEL, PRUNED_LEVEL, WINDOW_LEVEL, column
from ..pages.rows import compute_dtype
from ..pages.segments import segments
from .compaction import settle
from .state import Store
from .transform import model_form, model_keys


class IntegrityError(RuntimeError):
    """Raised when pages, tables and counts contradict each other."""


@dataclass(frozen=True)
class LayerTokens:
    """Tokens of one layer by logical position.

    Attributes:
        keys, values: dequantised keys and values, [batch, heads, seen, dim], float32 (float64 for float64 models); zero
            where nothing is stored.
        score: significance sums, float32 [batch, heads, seen]; zero if the store keeps none.
        levels: level of each token, int8 [batch, heads, seen]: -1 padding, 0 pruned, 1 low, 2 high, 3 window or sink.
    """

    keys: Tensor
    values: Tensor
    score: Tensor
    levels: Tensor

    @property
    def mask(self) -> Tensor:
        """Mask of stored tokens, bool [batch, heads, seen]."""
        return self.levels > PRUNED_LEVEL


@dataclass(frozen=True)
class Payload:
    """Token counts of a store.

    Attributes:
        high, low, window: tokens at each level, int64 [layers, batch, heads].
        seen: real tokens seen, int64 [layers, batch].
    """

    high: Tensor
    low: Tensor
    window: Tensor
    seen: Tensor


def levels(store: Store, layer: int) -> Tensor:
    """Returns the level of each token of a layer, int8 [batch, heads, seen], as in `LayerTokens.levels`."""
    settle(store)
    by_index = _by_index(store, torch.zeros((), dtype=torch.int8, device=store.device))
    for tier, level in ((HIGH, HIGH_LEVEL), (LOW, LOW_LEVEL)):
        tokens = stored_tokens(store.rows(layer), tier)
        by_index[tokens.row, token_positions(store.rows(layer), tier, tokens)] = level
    row, position = store.rows(layer).exact_tokens()
    by_index[row, position] = WINDOW_LEVEL
    for rows, position, _, _ in _recorded_tokens(store, layer):
        by_index[rows, position] = WINDOW_LEVEL
    result = _to_logical(store, by_index)
    return result.masked_fill(~store.padding.mask()[:, None], PADDING_LEVEL)


def read_tokens(store: Store, layer: int) -> LayerTokens:
    """Reads keys, values, sums and levels of one layer."""
    level, rows = levels(store, layer), store.rows(layer)
    dtype = compute_dtype(store.dtype)
    keys = _by_index(store, torch.zeros(store.key_dim, dtype=dtype, device=store.device))
    values = _by_index(store, torch.zeros(store.value_dim, dtype=dtype, device=store.device))
    score = _by_index(store, torch.zeros((), dtype=torch.float32, device=store.device))
    for tier, layout in enumerate(rows.tiers):
        tokens = stored_tokens(rows, tier)
        view = segments(rows.pages, layout)
        position = token_positions(rows, tier, tokens)
        tier_keys, tier_values = store.ops.load_tokens(rows.pages, layout, tokens.page, tokens.slot, store.dtype)
        keys[tokens.row, position], values[tokens.row, position] = tier_keys.to(dtype), tier_values.to(dtype)
        score[tokens.row, position] = view.scores(tokens.page, tokens.slot)
    row, position = rows.exact_tokens()
    slot = rows.slots_of(row, position)
    keys[row, position] = rows.window_key.flatten(0, 1)[row, slot].to(dtype)
    values[row, position] = rows.window_value.flatten(0, 1)[row, slot].to(dtype)
    score[row, position] = rows.window_score.flatten(0, 1)[row, slot]
    # in the model's channels
    keys, values = (part.unflatten(0, (store.batch_size, store.num_heads)) for part in (keys, values))
    keys, values = model_keys(store, layer, keys).flatten(0, 1), model_form(store, values).flatten(0, 1)
    for row, position, recorded_keys, recorded_values in _recorded_tokens(store, layer):
        keys[row, position], values[row, position] = recorded_keys.to(dtype), recorded_values.to(dtype)
    absent = level <= PRUNED_LEVEL
    return LayerTokens(
        _to_logical(store, keys).masked_fill(absent[..., None], 0),
        _to_logical(store, values).masked_fill(absent[..., None], 0),
        _to_logical(store, score).masked_fill(absent, 0),
        level,
    )


def payload(store: Store) -> Payload:
    """Returns the token counts of all layers."""
    settle(store)
    none = torch.zeros(store.batch_size, dtype=torch.int64, device=store.device)
    recorded = torch.stack([none if r is None else r.real().sum(-1) for r in store.recorded])
    window = (store.all_rows().held_count().view(recorded.shape) + recorded)[..., None].expand_as(store.high_count)
    return Payload(store.high_count.long(), store.low_count.long(), window, store.length + recorded)


def check_integrity(store: Store) -> None:
    """Raises `IntegrityError` unless page ownership, counts, tables and positions agree."""
    settle(store)
    store.look()
    rows = store.num_layers * store.batch_size * store.num_heads
    table = store.table.table.view(rows, -1)
    width = table.shape[1]
    expected = torch.zeros_like(table, dtype=torch.bool)
    # without token selection, full pages never change, and requests may share them
    changing = torch.full_like(expected, store.layout.selects)
    entries = torch.arange(width, device=store.device)
    for tier, layout, count in ((HIGH, store.layout.high, store.high_count), (LOW, store.layout.low, store.low_count)):
        used = (count.view(rows, 1) + layout.capacity - 1) // layout.capacity
        mine = column(tier, entries, width) < used
        changing |= mine & (column(tier, entries, width) >= count.view(rows, 1) // layout.capacity)
        _require(not (expected & mine).any(), "high and low pages of a row meet")
        expected |= mine
    _require(((table != NULL_PAGE) == expected).all(), "a page table row disagrees with its counts")
    free = store.pool.free_list.ids()
    owners = torch.bincount(table[expected], minlength=store.pool.capacity)
    _require((owners[table[expected & changing].long()] == 1).all(), "a page that changes appears twice in a table")
    owners *= 1 if store.twins is None else len(store.twins)
    _require((owners[free.long()] == 0).all(), "a free page is owned")
    owned = torch.cat([owners.nonzero()[:, 0], free.long()]).sort().values
    everything = torch.arange(1, store.pool.capacity, device=store.device)
    _require(owned.shape == everything.shape and bool((owned == everything).all()), "a page is lost or owned twice")
    used = owners.nonzero()[:, 0]
    _require((store.pool.owners(used) == owners[used]).all(), "the owner count of a page is wrong")
    _require(free.numel() == store.pool.free_list.free, "the free count disagrees with the free list")
    for layer in range(store.num_layers):
        _check_tokens(store, layer)


def _check_tokens(store: Store, layer: int) -> None:
    start, length, end = store.window_start[layer], store.length[layer], store.sink_end[layer]
    ring = store.window_slots - store.sink_slots
    _require((length - start <= ring).all(), "a window holds more tokens than it has slots")
    ordered = (0 <= end) & (end <= store.sink_slots) & (end <= start) & (start <= torch.maximum(length, end))
    _require(ordered.all(), "a window does not begin after the sinks, or begins after its end")
    seen = torch.zeros(
        store.batch_size * store.num_heads, int(length.max()) + 1, dtype=torch.int32, device=store.device
    )
    starts, ends = (t.repeat_interleave(store.num_heads) for t in (start, end))
    for tier, layout in ((HIGH, store.layout.high), (LOW, store.layout.low)):
        tokens = stored_tokens(store.rows(layer), tier)
        view = segments(store.pool.pages, layout)
        position = token_positions(store.rows(layer), tier, tokens)
        score = view.scores(tokens.page, tokens.slot)
        placed = (position >= ends[tokens.row]) & (position < starts[tokens.row])
        _require(placed.all(), "a stored token has no valid position")
        _require((score.isfinite() & (score >= 0)).all(), "a stored token has no valid significance")
        seen.index_put_((tokens.row, position), torch.ones_like(position, dtype=torch.int32), accumulate=True)
    _require(int(seen.max()) <= 1, "a token is stored twice")
    if not store.layout.selects:
        outside, low = (start - end)[:, None], store.low_heads[layer]
        expected = (outside.masked_fill(low, 0), outside.masked_fill(~low, 0))
        complete = (store.high_count[layer] == expected[HIGH]) & (store.low_count[layer] == expected[LOW])
        _require(complete.all(), "not every token outside the window is stored, though none is chosen")


def _require(condition: Tensor | bool, message: str) -> None:
    if not condition:
        raise IntegrityError(f"cache integrity: {message}.")


def _recorded_tokens(store: Store, layer: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Returns row, token index, key and value of each recorded token; empty if there is none."""
    recorded = store.recorded[layer]
    if recorded is None:
        return []
    valid = recorded.real()
    position = store.length[layer][:, None] + valid.cumsum(-1) - 1
    valid, position = (t.repeat_interleave(store.num_heads, dim=0) for t in (valid, position))
    row, column = valid.nonzero(as_tuple=True)
    return [
        (row, position[row, column], recorded.key.flatten(0, 1)[row, column], recorded.value.flatten(0, 1)[row, column])
    ]


def _by_index(store: Store, like: Tensor) -> Tensor:
    """Returns zeros [rows, max(seen, 1), *like.shape], to be filled by token index."""
    shape = (store.batch_size * store.num_heads, max(store.padding.length, 1), *like.shape)
    return torch.zeros(shape, dtype=like.dtype, device=store.device)


def _to_logical(store: Store, by_index: Tensor) -> Tensor:
    """Reorders [rows, tokens, ...] by token index to [batch, heads, seen, ...] by logical position."""
    real = store.padding.mask()
    index = (real.cumsum(-1) - 1).clamp(min=0).repeat_interleave(store.num_heads, dim=0)
    rows = torch.arange(by_index.shape[0], device=store.device)[:, None]
    return by_index[rows, index].unflatten(0, (store.batch_size, store.num_heads))
