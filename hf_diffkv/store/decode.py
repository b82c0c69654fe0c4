"""Decode step: one new token per request is appended to the window, attends, and updates the significance sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.softmax import SharedAttention, Softmax
from .state import Changing, Store
from .transform import model_form, query_form

if TYPE_CHECKING:
    from ..ops.decode_attention.scratch import Scratch

SCRATCH_TOKENS = 1024


class StepAttention:
    """One new token per request, to which a layer and perhaps later ones attend.

    Args:
        layer: index of the layer within the store.
        key, value: key and value states, [batch, heads, 1, dim].
        valid: True where the token is real, bool [batch]; None if all are.
    """

    def __init__(self, store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None = None) -> None:
        self._store, self._layer, self._key, self._value, self._valid = store, layer, key, value, valid
        # the attention of several layers, once the token is appended for the first of them
        self._held: SharedAttention | None = None

    def attend(self, query: Tensor, softmax: Softmax, last: bool = True) -> Tensor:
        """Stores the token, updates the sums and returns one layer's attention output.

        Args:
            query: query states, [batch, query_heads, 1, key_dim].
            last: whether no further layer reads these tokens.

        Returns:
            Attention output, [batch, query_heads, 1, value_dim] in the query's dtype.
        """
        store, layer = self._store, self._layer
        store.note_logits(layer, softmax)
        bounds = store.layer_bounds[layer]
        scratch = prepare_scratch(store, query[:, :, 0], bounds.max_tokens)
        options = {"bounds": bounds, "scratch": scratch, "valid": self._valid}
        with Changing(store):
            if last and self._held is None:
                options |= {"rotation": store.rotation, "limit": store.value_limit}
                rows = store.rows(layer)
                return store.ops.append_and_attend(query, self._key, self._value, rows, softmax, **options)
            self.append()
            self._held.last = last
            query = query_form(store, query)[:, :, 0]
            output = store.ops.decode_attention(query, store.rows(layer), softmax, held=self._held, **options)
            # heads are passed as tokens: tiles of one token each would read the matrix once per tile
            return model_form(store, output[None])[0][:, :, None]

    def append(self) -> None:
        """Stores the token now unless it is stored already; otherwise the first `attend` would store it."""
        if self._held is not None:
            return
        store, key, value = self._store, self._key[:, :, 0], self._value[:, :, 0]
        options = {"limit": store.value_limit, "valid": self._valid, "rotation": store.rotation}
        with Changing(store):
            store.ops.append_token(store.rows(self._layer), key, value, **options)
            self._held = SharedAttention()


def prepare_scratch(store: Store, query: Tensor, max_tokens: int = 0) -> Scratch | None:
    """Returns buffers shared by all layers. They grow in steps, because a captured graph keeps using them.

    Args:
        query: query states, [batch, query_heads, key_dim]; only the shape, dtype and device matter.
    """
    if store.ops.allocate_scratch is None:
        return None
    held, rows = store.scratch, store.batch_size * store.num_heads
    if held is None or held.max_tokens < max_tokens or held.output.shape[0] != rows:
        tokens = _scratch_tokens(store, max_tokens, store.room)
        store.scratch = store.ops.allocate_scratch(query, store.rows(0), tokens)
    return store.scratch


def planned_scratch(store: Store, query: Tensor, requests: int, room: int) -> int:
    """Returns the size in bytes of `prepare_scratch`'s buffers for `requests` requests and `room` tokens per row."""
    if store.ops.allocate_scratch is None:
        return 0
    planned = store.ops.allocate_scratch(query, store.rows(0), _scratch_tokens(store, 0, room), planned=requests)
    return sum(tensor.numel() * tensor.element_size() for tensor in planned.tensors())


def _scratch_tokens(store: Store, max_tokens: int, room: int) -> int:
    return -(-max(max_tokens, room + store.window_slots) // SCRATCH_TOKENS) * SCRATCH_TOKENS
