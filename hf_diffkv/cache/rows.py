"""Sequences of a batch: their numbers as users give them, and how many of them Transformers' own layers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def as_index(name: str, given: Any) -> Tensor:
    """Converts numbers of sequences, or a mask of them, to a tensor of one dimension.

    Args:
        name: name of the argument, for error messages.
        given: tensor or sequence of integers or booleans.

    Raises:
        ValueError: `given` has another number of dimensions, or other numbers.
    """
    index = torch.as_tensor(given)
    if index.ndim != 1 or (index.numel() > 0 and (index.is_floating_point() or index.is_complex())):
        raise ValueError(
            f"{name} is {index.dtype} of shape {tuple(index.shape)}; pass a list or a tensor of one dimension, with an "
            "integer for each sequence."
        )
    return index


def rows_held(layers: Sequence[Any]) -> int:
    """Returns the number of sequences that Transformers' own layers hold; 0 if they are empty."""
    states = (state for layer in layers for state in _states(layer))
    return next((state.shape[0] for state in states if state is not None and state.numel() > 0), 0)


def _states(layer: Any) -> list[Tensor | None]:
    found = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None) or ()
        found.extend(states.values() if isinstance(states, Mapping) else states)
    return found
