"""Layers of Transformers' own beside compressed ones: sliding windows, linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import stopped_halfway


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
