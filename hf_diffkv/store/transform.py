"""Conversion between the model's keys and values and the form in which a store holds them.

Sinks and the newest tokens are held exactly, in the window (slots: pages/rows.py).

A key k is held as R (k - mu) and a value v as R v. R rotates the channels (ops/rotation.py), and mu is a mean key of
each (layer, request, KV head). Pages and window hold the same form, so the code inside a store need not know of it:
queries are rotated to R q on entry, and attention outputs are rotated back. A native step does both itself (native.py).
Since (R q) . R (k - mu) = q . k - q . mu and q . mu is the same for all tokens of a row, the softmax does not change.
It would change with an attention sink or a softcap, so layers that have one are rotated but not centred.

mu is zero until the first token of a row leaves the window. Then it is fixed as the mean of all the row's keys so far,
including those of the current forward, and the window is centred again. It stays fixed even if the mean of later keys
differs. A row with nothing left outside the window (because a mask hid tokens) starts over.

Keys are rounded for the queries of the forward that brings them (ops/rounding). The moments of these queries are taken
from the prompt, turn or chunk and then dropped, so they use no memory between forwards. Tokens that leave the window
during generation are rounded with the measured moments of the model's queries (heads/query_moments.py), or element by
element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.rotation import tokens_at_once
from ..ops.table import Ops
from ..pages import EarlierTokens
from ..pages.rows import compute_dtype
from .faults import unstorable
from .state import Store


def stored_form(store: Store, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Converts the model's keys and values, [batch, heads, tokens, dim], to the store's form."""
    rotate = store.ops.rotate
    return rotate(key, store.key_rotation, store.rows(layer).offset), rotate(value, store.value_rotation)


def query_form(store: Store, query: Tensor) -> Tensor:
    """Converts queries, [batch, query_heads, tokens, key_dim], to the store's form; absorbed ones (latent.py) too."""
    if store.heads.latent:
        rope, latent = query.split([store.key_dim, store.value_dim], dim=-1)
        rotated = store.ops.rotate(rope, store.key_rotation), store.ops.rotate(latent, store.value_rotation)
        return torch.cat(rotated, dim=-1)
    return store.ops.rotate(query, store.key_rotation)


def model_form(store: Store, output: Tensor) -> Tensor:
    """Rotates attention outputs over stored values, [batch, heads, tokens, value_dim], back to the model's form."""
    matrix = store.value_rotation
    return output if matrix is None else store.ops.rotate(output, matrix.mT)


def model_keys(store: Store, layer: int, key: Tensor) -> Tensor:
    """Converts the store's keys, [batch, heads, tokens, key_dim] in the compute dtype, back to the model's form."""
    offset, matrix = store.rows(layer).offset, store.key_rotation
    key = key if offset is None else key + offset[:, :, None]
    return key if matrix is None else store.ops.rotate(key, matrix.mT)


def check_finite(store: Store, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
    """Raises `ValueError` unless all real keys and values can be stored.

    Args:
        key, value: key and value states of the model, [batch, heads, tokens, dim].
        valid: True for real tokens, bool [batch, tokens]; None if all are.
    """
    for tensor in (key, value):
        parts = tensor.split(tokens_at_once(tensor), dim=2)
        if store.config.rotate:
            # the norm bounds every element under any rotation
            dtype = compute_dtype(tensor.dtype)
            peaks = [torch.linalg.vector_norm(part, dim=3, dtype=dtype).amax(1) for part in parts]
        else:
            peaks = [part.abs().amax((1, 3)) for part in parts]
        peak = torch.cat(peaks, dim=1)
        peak = peak if valid is None else torch.where(valid, peak, 0)
        if not bool((peak <= store.value_limit).all()):
            raise unstorable(store.config, store.value_limit)


def query_moment(store: Store, query: Tensor, valid: Tensor | None) -> Tensor | None:
    """Returns `second_moment` of the queries; None if keys are rounded to the nearest code.

    Args:
        query: queries of the model from the newest n tokens, [batch, query_heads, n, key_dim].
        valid: True for real tokens among the Q >= n new ones, bool [batch, Q]; None if all are real.
    """
    if not store.rounds_for_queries:
        return None
    valid = None if valid is None else valid[:, valid.shape[1] - query.shape[2] :]
    return store.ops.second_moment(query, store.num_heads, valid)


def feedback(store: Store, moment: Tensor | None) -> Tensor | None:
    """Returns the feedback of `round_keys` for keys in the store's form, [rows, key_dim, key_dim], or None."""
    return None if moment is None else store.ops.feedback_of(moment, store.key_rotation)


class NewPrompt:
    """New tokens of one layer in the model's form, converted to the store's form on demand.

    Args:
        key, value: key and value states of the model, [batch, heads, tokens, dim].
        valid: True for real tokens, bool [batch, tokens]; None if all are.
    """

    def __init__(self, store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        self.key, self.value, self.valid = key, value, valid
        self._store, self._layer = store, layer
        self._attended: tuple[Tensor, Tensor] | None = None

    def attended_with(self, past: EarlierTokens) -> tuple[Tensor, Tensor]:
        """Returns keys and values in the form used for attention together with `past`."""
        if past.rows is None:
            return self.key, self.value
        if self._attended is None:
            self._attended = stored_form(self._store, self._layer, self.key, self.value)
        return self._attended

    def stored(self) -> tuple[PromptSource, Tensor | None]:
        """Returns the keys and values to store, and the rows' new offset.

        The offset is [batch, heads, key_dim], or None if it does not change.
        """
        store, layer = self._store, self._layer
        offset = self._fixed_offset()
        if offset is None and self._attended is not None:
            return PromptSource(store.ops, *self._attended, None, None, None), None
        held = store.rows(layer).offset if offset is None else offset
        return PromptSource(store.ops, self.key, self.value, store.key_rotation, store.value_rotation, held), offset

    def _fixed_offset(self) -> Tensor | None:
        store, layer = self._store, self._layer
        window = store.config.window
        # `seen` is no less than any row's length
        if not store.config.center or layer in store.uncentered or store.seen <= window + store.sink_slots:
            return None
        rows = store.rows(layer)
        length = rows.length + (self.key.shape[2] if self.valid is None else self.valid.sum(-1))
        due = rows.is_whole() & (length - rows.window_start > window)
        if not bool(due.any()):
            return None
        offset = rows.key_offset
        total = store.ops.rotate(self._sum_of_keys(offset.dtype), store.key_rotation)[:, :, 0]
        in_window = rows.held_tokens() >= 0
        before = rows.window_key.to(offset.dtype).masked_fill(~in_window[:, None, :, None], 0.0).sum(2)
        mean = (total + before + rows.length[:, None, None] * offset) / length.clamp(min=1)[:, None, None]
        return torch.where(due[:, None, None], mean, offset)

    def _sum_of_keys(self, dtype: torch.dtype) -> Tensor:
        """Returns the sum of all real keys, [batch, heads, 1, key_dim]."""
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
    """New tokens indexed in [batch, heads, tokens] order and converted to the store's form when read.

    Attributes:
        ops: ops of the store.
        key, value: key and value states of the model, [batch, heads, tokens, dim].
        key_rotation, value_rotation, offset: arguments of `rotate`; None leaves the channels unchanged.
    """

    ops: Ops
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
        # each token is treated as a separate head
        rotate = self.ops.rotate
        key = rotate(self.key[place][None, :, None], self.key_rotation, offset)
        value = rotate(self.value[place][None, :, None], self.value_rotation)
        return key[0, :, 0], value[0, :, 0]
