"""Decode step: one new token per request is appended to the window, attends, and updates the significance sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.append import append_rotated, append_token
from ..ops.backend import NATIVE
from ..ops.decode_attention import Held, allocate_scratch, decode_attention, scratch_bytes
from ..ops.softmax import Softmax
from . import native
from .forms import model_form, note_logits, query_form, stored_form
from .state import Store

if TYPE_CHECKING:
    from ..ops.decode_attention.scratch import Scratch

SCRATCH_TOKENS = 1024


def attend_token(
    store: Store,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    valid: Tensor | None = None,
) -> Tensor:
    """Stores the newest token of every request and attends from it.

    Args:
        layer: index of the layer within the store.
        query: query states, [batch, query_heads, 1, key_dim].
        key, value: key and value states, [batch, heads, 1, dim].
        valid: True where the token is real, bool [batch]; None if all are.

    Returns:
        Attention output, [batch, query_heads, 1, value_dim] in the query's dtype.
    """
    if store.backend() == NATIVE:
        note_logits(store, layer, softmax)
        return native.append_and_attend(store, layer, query, key, value, softmax, valid=valid)
    if store.heads.latent:
        append(store, layer, key, value, valid)
        query = query_form(store, query)
    else:
        query = append(store, layer, key, value, valid, query)
    return attend_newest(store, layer, query, softmax, valid)


def append(
    store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None, query: Tensor | None = None
) -> Tensor | None:
    """Stores the newest token of every request and returns the query in the store's form (`query_form`).

    Arguments as in `attend_token`.
    """
    rows, rotation = store.rows(layer), store.rotation
    options = {"limit": store.value_limit, "valid": valid}
    if rotation is None:
        key, value = stored_form(store, layer, key, value)
        append_token(rows, key[:, :, 0], value[:, :, 0], **options)
        return query
    newest = None if query is None else query[:, :, 0]
    rotated = append_rotated(rows, key[:, :, 0], value[:, :, 0], newest, rotation, **options)
    return None if rotated is None else rotated[:, :, None]


def attend_newest(
    store: Store,
    layer: int,
    query: Tensor,
    softmax: Softmax,
    valid: Tensor | None = None,
    held: Held | None = None,
) -> Tensor:
    """Attends from the newest token of every request, which `append` has stored, and updates the sums.

    Args:
        query: query states in the store's form (`query_form`), [batch, query_heads, 1, key_dim].
        held: accumulator that joins the sums of several layers attending to the same tokens; None for one layer.
            Other arguments as in `attend_token`.

    Returns:
        Attention output, [batch, query_heads, 1, value_dim] in the query's dtype.
    """
    note_logits(store, layer, softmax)
    bounds, query = store.bounds(layer), query[:, :, 0]
    scratch = prepare_scratch(store, query, bounds.max_tokens)
    options = {"bounds": bounds, "scratch": scratch, "valid": valid, "held": held}
    output = decode_attention(query, store.rows(layer), softmax, **options)
    # heads are passed as tokens: tiles of one token each would read the matrix once per tile
    return model_form(store, output[None])[0][:, :, None]


class SharedStep:
    """One generated token per request that several layers attend to (readers.py). Arguments as in `attend_token`."""

    def __init__(self, store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        self._store, self._layer, self._valid = store, layer, valid
        self._held = Held()
        append(store, layer, key, value, valid)

    def attend(self, query: Tensor, last: bool, softmax: Softmax) -> Tensor:
        """Returns one layer's attention output, as `attend_token` does.

        Args:
            last: True if no further layer reads these tokens.
        """
        self._held.last = last
        query = query_form(self._store, query)
        return attend_newest(self._store, self._layer, query, softmax, self._valid, self._held)


def prepare_scratch(store: Store, query: Tensor, max_tokens: int = 0) -> Scratch | None:
    """Returns buffers shared by all layers. They grow in steps, because a captured graph keeps using them.

    Args:
        query: query states, [batch, query_heads, key_dim]; only the shape, dtype and device matter.
    """
    held, rows = store.scratch, store.batch_size * store.num_heads
    if store.heads.latent:
        return None
    if held is None or held.max_tokens < max_tokens or held.output.shape[0] != rows:
        store.scratch = allocate_scratch(query, store.rows(0), _scratch_tokens(store, max_tokens, store.room))
    return store.scratch


def planned_scratch(store: Store, query: Tensor, requests: int, room: int) -> int:
    """Returns the size in bytes of `prepare_scratch`'s buffers for `requests` requests and `room` tokens per row."""
    return scratch_bytes(query, store.rows(0), _scratch_tokens(store, 0, room), requests)


def _scratch_tokens(store: Store, max_tokens: int, room: int) -> int:
    return -(-max(max_tokens, room + store.window_slots) // SCRATCH_TOKENS) * SCRATCH_TOKENS
