"""The form in which a store holds tokens: exact ones in windows, and keys and values rotated, keys less an offset.

Sinks and the newest tokens are exact (their slots: pages/rows.py).

A key k is held as R (k - mu) and a value v as R v, with a rotation R of the channels (ops/rotation.py) and a mean key
mu of each (layer, request, KV head). Pages and window alike hold that form, so nothing inside a store knows of it:
queries come in as R q, and what attention gives goes out rotated back; a native step does both itself (native.py).
As (R q) . R (k - mu) = q . k - q . mu, and q . mu is the same for all tokens of a row, the softmax is what it was. It
would not be beside an attention sink, nor under a softcap: layers that have one are rotated and not centred.

mu is fixed when the first token of a row leaves the window, as the mean of all the row's keys until then, those of
the forward that makes it leave included. Until then it is zero, and the window is centred anew when it is fixed.
Afterwards it stays, also where the mean of later keys is another. A row of which nothing outside the window is left
(tokens that a mask hides) starts over.

How keys are rounded when they are stored is up to the queries of the forward that brings them (ops/rounding). What
these say is taken from the prompt, the turn or the chunk itself and then forgotten: it takes no memory between
forwards. Tokens that leave the window while generating are rounded by what is known of the model's queries
(query_moments.py), or each element for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.backend import compute_dtype
from ..ops.rotation import center_windows, rotate, tokens_at_once
from ..ops.rounding import feedback_of, second_moment
from ..ops.softmax import Softmax
from ..pages import EarlierTokens, rows
from .state import Store

ALL = slice(None)


def is_whole(store: Store, layer: int | slice = ALL) -> Tensor:
    """bool [layers, batch], or without layers: where no token has left the window."""
    return store.window_start[layer] == store.sink_end[layer]


def held_tokens(store: Store, layer: int | slice = ALL) -> Tensor:
    """int64 [layers, batch, window_slots], or without layers: the token in each slot, -1 for none."""
    state = (store.window_start[layer], store.length[layer], store.sink_end[layer])
    return rows.held_tokens(*state, store.sink_slots, store.window_slots)


def held_count(store: Store, layer: int | slice = ALL) -> Tensor:
    """int64 [layers, batch], or without layers: how many there are."""
    return rows.held_count(store.window_start[layer], store.length[layer], store.sink_end[layer])


def slots_of(store: Store, position: Tensor, sink_end: Tensor) -> Tensor:
    """Their slots; position, and what their requests have as `sink_end`: int64 that broadcast."""
    return rows.slots_of(position, sink_end, store.sink_slots, store.window_slots)


def exact_tokens(store: Store, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, row and index, int64 [n] each, of those of one layer."""
    token = held_tokens(store, layer).repeat_interleave(store.num_heads, dim=0)
    row, slot = (token >= 0).nonzero(as_tuple=True)
    return slot, row, token[row, slot]


def center_rows(store: Store) -> None:
    """Fixes the key offset of rows whose first token is about to leave the window (see above)."""
    due = is_whole(store) & (store.length - store.window_start > store.config.window)
    for layer in store.uncentered:
        due[layer] = False
    center_windows(store.window_key, held_tokens(store) >= 0, store.key_offset, due)


def stored_form(store: Store, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the model, [batch, heads, tokens, dim], as the store holds them."""
    return rotate(key, store.key_rotation, _offset(store, layer)), rotate(value, store.value_rotation)


def query_form(store: Store, query: Tensor) -> Tensor:
    """Queries [batch, query_heads, tokens, key_dim] to attend to what the store holds with."""
    return rotate(query, store.key_rotation)


def model_form(store: Store, output: Tensor) -> Tensor:
    """What attention to the store's values gave, [batch, heads, tokens, value_dim], in the model's channels."""
    matrix = store.value_rotation
    return output if matrix is None else rotate(output, matrix.mT)


def model_keys(store: Store, layer: int, key: Tensor) -> Tensor:
    """Keys of the store, [batch, heads, tokens, key_dim] in the dtype of the computation, as the model had them."""
    if store.config.center:
        key = key + store.key_offset[layer][:, :, None]
    matrix = store.key_rotation
    return key if matrix is None else rotate(key, matrix.mT)


def note_logits(store: Store, layer: int, softmax: Softmax) -> None:
    """Notes whether a layer's attention depends on more than differences of its logits, so that it is not centred."""
    if softmax.softcap is not None or softmax.sinks is not None:
        store.uncentered.add(layer)


def _offset(store: Store, layer: int) -> Tensor | None:
    return store.key_offset[layer] if store.config.center else None


def check_finite(store: Store, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
    """Raises `ValueError` unless all real keys and values, [batch, heads, tokens, dim], can be stored."""
    for tensor in (key, value):
        peaks = [_peak(store, part) for part in tensor.split(tokens_at_once(tensor), dim=2)]
        peak = torch.cat(peaks, dim=1)
        peak = peak if valid is None else torch.where(valid, peak, 0)
        if not bool((peak <= store.value_limit).all()):
            raise ValueError(store.value_message())


def _peak(store: Store, tensor: Tensor) -> Tensor:
    """The largest that an element of each token [batch, heads, tokens, dim] may be in the store, [batch, tokens]."""
    if store.config.rotate:
        # no element is larger than that, however a token is rotated
        return torch.linalg.vector_norm(tensor, dim=3, dtype=compute_dtype(tensor.dtype)).amax(1)
    return tensor.abs().amax((1, 3))


def query_moment(store: Store, query: Tensor, valid: Tensor | None) -> Tensor | None:
    """`second_moment` of queries [batch, query_heads, n, key_dim] of the model; None where keys are rounded plainly.

    Args:
        valid: bool [batch, Q] of the Q >= n new tokens, of which these are the newest; None where all are real.
    """
    if not store.rounds_for_queries:
        return None
    valid = None if valid is None else valid[:, valid.shape[1] - query.shape[2] :]
    return second_moment(query, store.num_heads, valid)


def feedback(store: Store, moment: Tensor | None) -> Tensor | None:
    """[rows, key_dim, key_dim], as `round_keys` takes it for keys in the store's form."""
    return None if moment is None else feedback_of(moment, store.key_rotation)


class Entering:
    """New tokens of one layer: as the model has them, and in the forms the store needs them in.

    Args:
        key, value: [batch, heads, tokens, dim]; valid: bool [batch, tokens], None where all are real.
    """

    def __init__(self, store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        self.key, self.value, self.valid = key, value, valid
        self._store, self._layer = store, layer
        self._beside_past: tuple[Tensor, Tensor] | None = None

    @classmethod
    def checked(cls, store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None) -> Entering:
        """The same, once `check_finite` has passed; where tokens enter at once, they are checked then."""
        if not store.enters_at_once:
            check_finite(store, key, value, valid)
        return cls(store, layer, key, value, valid)

    def beside(self, past: EarlierTokens) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to together with `past`."""
        if past.rows is None:
            return self.key, self.value
        if self._beside_past is None:
            self._beside_past = stored_form(self._store, self._layer, self.key, self.value)
        return self._beside_past

    def stored(self) -> tuple[PromptSource, Tensor | None]:
        """Keys and values to store, and the offset of all rows [batch, heads, key_dim] then; None if it stays."""
        store, layer = self._store, self._layer
        offset = self._fixed_offset()
        if offset is None and self._beside_past is not None:
            return PromptSource(*self._beside_past, None, None, None), None
        held = _offset(store, layer) if offset is None else offset
        return PromptSource(self.key, self.value, store.key_rotation, store.value_rotation, held), offset

    def _fixed_offset(self) -> Tensor | None:
        store, layer = self._store, self._layer
        window = store.config.window
        # `seen` is no less than any row's length
        if not store.config.center or layer in store.uncentered or store.seen <= window + store.sink_slots:
            return None
        held = store.length[layer]
        length = held + (self.key.shape[2] if self.valid is None else self.valid.sum(-1))
        due = is_whole(store, layer) & (length - store.window_start[layer] > window)
        if not bool(due.any()):
            return None
        offset = store.key_offset[layer]
        total = rotate(self._sum_of_keys(offset.dtype), store.key_rotation)[:, :, 0]
        in_window = held_tokens(store, layer) >= 0
        before = store.window_key[layer].to(offset.dtype).masked_fill(~in_window[:, None, :, None], 0.0).sum(2)
        mean = (total + before + held[:, None, None] * offset) / length.clamp(min=1)[:, None, None]
        return torch.where(due[:, None, None], mean, offset)

    def _sum_of_keys(self, dtype: torch.dtype) -> Tensor:
        """Over all real tokens, [batch, heads, 1, key_dim]."""
        total = torch.zeros_like(self.key[:, :, :1], dtype=dtype)
        step = tokens_at_once(self.key)
        for start in range(0, self.key.shape[2], step):
            key = self.key[:, :, start : start + step]
            if self.valid is not None:
                key = key.masked_fill(~self.valid[:, None, start : start + step, None], 0.0)
            total += key.sum(2, keepdim=True, dtype=dtype)
        return total


@dataclass(frozen=True)
class PromptSource:
    """New tokens in the order of [batch, heads, tokens], in the store's form when they are read.

    Attributes:
        key, value: [batch, heads, tokens, dim] of the model.
        key_rotation, value_rotation, offset: as `rotate` takes them; None leaves channels as they are.
    """

    key: Tensor
    value: Tensor
    key_rotation: Tensor | None
    value_rotation: Tensor | None
    offset: Tensor | None

    def __len__(self) -> int:
        return self.key.shape[0] * self.key.shape[1] * self.key.shape[2]

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        heads, tokens = self.key.shape[1:3]
        row, token = index // tokens, index % tokens
        place = row // heads, row % heads, token
        offset = None if self.offset is None else self.offset[place[:2]][None]
        # as if each token were a head of its own
        key = rotate(self.key[place][None, :, None], self.key_rotation, offset)
        value = rotate(self.value[place][None, :, None], self.value_rotation)
        return key[0, :, 0], value[0, :, 0]
