"""Layers of Transformers' own beside compressed ones: sliding windows, linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import stopped_halfway


class OtherStates:
    """States of linear attention in a cache with `stores`: a forward that comes to them has its turn (turns.py)."""

    stores: Any

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._reach_states(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._reach_states(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    # models write into the states that they get
    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._reach_states(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)  # type: ignore[misc]

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._reach_states(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)  # type: ignore[misc]

    def _reach_states(self, layer_idx: int) -> None:
        if not (torch.compiler.is_compiling() or self.stores.capturing):
            self.stores.turns.reach(layer_idx, comes_once=False)


def check_lengths(layers: Sequence[Any], layer_idx: int, seen: int, tokens: int) -> None:
    """Raises `HandOverError` unless sliding windows stand where the first compressed layer is.

    Args:
        layer_idx: of that layer, before its `tokens` come to those that it has `seen`.
    """
    for index, layer in enumerate(layers):
        expected = seen + tokens if index < layer_idx else seen
        if hasattr(layer, "sliding_window") and layer.get_seq_length() != expected:
            raise stopped_halfway()


def check_croppable(layer: Any, tokens_to_remove: int) -> None:
    """Raises `ValueError` if a layer of Transformers' own has dropped what `crop` would have to bring back."""
    if tokens_to_remove == 0 or getattr(layer, "record_past", True):
        return
    if not hasattr(layer, "sliding_window") or layer.get_seq_length() >= layer.sliding_window:
        raise ValueError(
            f"cannot remove {-tokens_to_remove} tokens: a {type(layer).__name__} keeps only what the next token needs. "
            "Call activate_past_recording() before the forward whose tokens may be rejected (generate() does), or keep "
            "a copy.deepcopy of the cache."
        )


def has_states(layer: Any) -> bool:
    """Whether a layer has states of linear attention, which a forward may write in several calls."""
    return hasattr(layer, "conv_states")
