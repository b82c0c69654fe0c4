"""Transformers' own layers next to compressed ones: sliding windows, linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import stopped_halfway


class OtherStates:
    """Mixin for linear-attention states in a cache with `stores`; forwards that use them take a turn (turns.py)."""

    stores: Any

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._reach_states(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._reach_states(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    # models write into the states they get
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
    """Raises `HandOverError` unless sliding windows have seen as many tokens as the first compressed layer.

    Args:
        layers: layers of the cache.
        layer_idx: index of the first compressed layer, which is about to be updated.
        seen: number of tokens that this layer has seen.
        tokens: number of new tokens.
    """
    for index, layer in enumerate(layers):
        expected = seen + tokens if index < layer_idx else seen
        if hasattr(layer, "sliding_window") and layer.get_seq_length() != expected:
            raise stopped_halfway()


def check_croppable(layer: Any, tokens_to_remove: int) -> None:
    """Raises `ValueError` if one of Transformers' own layers has dropped tokens that `crop` would have to restore."""
    if tokens_to_remove == 0 or getattr(layer, "record_past", True):
        return
    if not hasattr(layer, "sliding_window") or layer.get_seq_length() >= layer.sliding_window:
        raise ValueError(
            f"cannot remove {-tokens_to_remove} tokens: a {type(layer).__name__} keeps only what the next token needs. "
            "Call activate_past_recording() before the forward whose tokens may be rejected (generate() does), or keep "
            "a copy.deepcopy of the cache."
        )


def has_states(layer: Any) -> bool:
    """Returns whether a layer has linear-attention states, which a forward may write in several calls."""
    return hasattr(layer, "conv_states")
