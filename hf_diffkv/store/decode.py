"""One new token per request: append it to the window, attend, update sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.append import append_rotated, append_token
from ..ops.backend import NATIVE
from ..ops.decode_attention import Held, allocate_scratch, decode_attention
from . import native
from .state import Store
from .transform import model_form, note_logits, stored_form

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
    query = append(store, layer, key, value, valid, query)
    return attend_newest(store, layer, query, **options)


def append(
    store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None, query: Tensor | None = None
) -> Tensor | None:
    """Stores the newest token of every request; arguments as in `attend_token`. Returns `query_form` of the query."""
    window = (store.window_key, store.window_value, store.window_score, store.length)
    state = (*(tensor[layer] for tensor in window), store.invalid)
    options = {"limit": store.value_limit, "valid": valid}
    options |= {"sink_end": store.sink_end[layer], "sink_slots": store.sink_slots}
    if store.key_rotation is None:
        key, value = stored_form(store, layer, key, value)
        append_token(*state, key[:, :, 0], value[:, :, 0], **options)
        return query
    rotated = append_rotated(
        *state,
        key[:, :, 0],
        value[:, :, 0],
        None if query is None else query[:, :, 0],
        key_rotation=store.key_rotation,
        value_rotation=store.value_rotation,
        offset=store.key_offset[layer] if store.config.center else None,
        **options,
    )
    return None if rotated is None else rotated[:, :, None]


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
    # the heads as if they were tokens: tiles of one token each would read the matrix once for each
    return model_form(store, output[None])[0][:, :, None]


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
