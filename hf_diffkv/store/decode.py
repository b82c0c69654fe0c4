"""One new token per request: append it to the window, attend, update sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.append import append_token
from ..ops.backend import NATIVE
from ..ops.decode_attention import Held, allocate_scratch, decode_attention
from . import native
from .state import Store
from .transform import model_form, note_logits, step_form

if TYPE_CHECKING:
    from ..ops.decode_attention.scratch import Scratch

SCRATCH_TOKENS = 1024


def attend_token(
    store: Store,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Stores the newest token of every request and attends from it.

    Args:
        layer: index of the layer within the store.
        query: [batch, query_heads, 1, key_dim].
        key, value: [batch, heads, 1, dim].
        valid: bool [batch], where the token is real; None where all are.
        scaling, softcap, sinks: as in the attention ops.

    Returns:
        [batch, query_heads, 1, value_dim] in the query's dtype.
    """
    options = {"scaling": scaling, "valid": valid, "softcap": softcap, "sinks": sinks}
    if store.backend() == NATIVE:
        note_logits(store, layer, softcap, sinks)
        return native.append_and_attend(store, layer, query, key, value, **options)
    query, key, value = step_form(store, layer, query, key, value)
    append(store, layer, key, value, valid)
    return attend_newest(store, layer, query, **options)


def append(store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
    """Stores the newest token of every request, in the store's form; arguments as in `attend_token`."""
    append_token(
        store.window_key[layer],
        store.window_value[layer],
        store.window_score[layer],
        store.length[layer],
        store.invalid,
        key[:, :, 0],
        value[:, :, 0],
        limit=store.value_limit,
        valid=valid,
        sink_end=store.sink_end[layer],
        sink_slots=store.sink_slots,
    )


def attend_newest(
    store: Store,
    layer: int,
    query: Tensor,
    *,
    scaling: float,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    held: Held | None = None,
) -> Tensor:
    """Attends from the newest token of every request, which `append` has stored; updates sums.

    Args:
        query: as `query_form` returns it.
        held: joins the sums of several layers that attend to the same tokens; other arguments as in `attend_token`.

    Returns:
        [batch, query_heads, 1, value_dim] in the query's dtype.
    """
    note_logits(store, layer, softcap, sinks)
    bounds = store.bounds(layer)
    output = decode_attention(
        query[:, :, 0],
        store.pool.pages,
        store.layout,
        store.table.table[layer],
        store.high_count[layer],
        store.low_count[layer],
        store.window_key[layer],
        store.window_value[layer],
        store.window_score[layer],
        store.window_start[layer],
        store.length[layer],
        scaling=scaling,
        bounds=bounds,
        scratch=prepare_scratch(store, query[:, :, 0], bounds.max_tokens),
        valid=valid,
        softcap=softcap,
        sinks=sinks,
        held=held,
        sink_end=store.sink_end[layer],
        sink_slots=store.sink_slots,
    )
    return model_form(store, output[:, :, None])


def prepare_scratch(store: Store, query: Tensor, max_tokens: int = 0) -> Scratch | None:
    """Buffers shared by all layers; grown in steps, since a captured graph keeps using them.

    Args:
        query: [batch, query_heads, key_dim], of which the shape counts.
    """
    held = store.scratch
    fits = held is not None and held.max_tokens >= max_tokens and held.output.shape[0] == store.rows_per_layer
    if not fits:
        room = -(-max(max_tokens, store.room + store.window_slots) // SCRATCH_TOKENS) * SCRATCH_TOKENS
        store.scratch = allocate_scratch(query, store.num_heads, store.layout, store.window_slots, room)
    return store.scratch
