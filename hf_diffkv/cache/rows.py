"""Reorders, repeats and selects the sequences of a cache's batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..store import move_rows, prepare_rows, settle
from .held_tokens import HeldTokens
from .layer import DiffKVLayer
from .stores import Stores, between_forwards


class ChosenRows:
    """Mixin for a cache with `stores` and `layers` that reorders, repeats and selects sequences."""

    stores: Stores
    layers: Any
    held_tokens: HeldTokens
    check_handover: Callable[[], None]
    get_seq_length: Callable[..., int]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders sequences: sequence i becomes the former sequence beam_idx[i]; beam_idx: int64 [batch]."""
        index = as_index("beam_idx", beam_idx)
        if index.dtype == torch.bool:
            raise ValueError(
                f"beam_idx={index.tolist()} is a mask; pass the index of the old sequence for each new one, or call "
                "batch_select_indices to keep some."
            )
        self._select(index.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times, with copies next to each other."""
        if isinstance(repeats, bool) or not isinstance(repeats, Integral) or repeats < 1:
            raise ValueError(f"repeats={repeats!r} must be an integer of at least 1.")
        self._select(torch.arange(self.rows(), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` (int64, or bool [batch]) and frees the pages of the others at once."""
        indices = as_index("indices", indices)
        try:
            index = torch.arange(self.rows(), device="cpu").to(indices.device)[indices]
        except IndexError as error:
            raise ValueError(f"indices={indices.tolist()}: this cache holds {self.rows()} sequences.") from error
        self._select(index)

    def rows(self) -> int:
        """Returns the number of sequences held; 0 if the cache is empty."""
        return self.stores.all[0].batch_size if self.stores.all else rows_held(self.layers)

    @between_forwards
    def _select(self, index: Tensor) -> None:
        self.check_handover()
        batch = self.rows()
        if batch and (index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= batch):
            raise ValueError(f"indices {index.tolist()} must be in [0, {batch}) and not empty.")
        with self.stores.in_step():
            for store in self.stores.all:
                settle(store)
            for store in self.stores.all:
                self.stores.share_budget(store, max(0, index.numel() - store.batch_size))
                prepare_rows(store, index)
        # until all have moved, an error leaves the cache like this
        self.stores.broken = True
        for store in self.stores.all:
            move_rows(store, index)
        for layer in self.layers:
            # the other two methods leave linear-attention states as they are, or do not exist
            if not isinstance(layer, DiffKVLayer):
                layer.reorder_cache(index)
        self.held_tokens.select(index, self.get_seq_length())
        self.stores.broken = False


def as_index(name: str, given: Any) -> Tensor:
    """Converts sequence numbers, or a mask of sequences, to a tensor of one dimension.

    Args:
        name: name of the argument, for error messages.
        given: tensor or sequence of integers or booleans.

    Raises:
        ValueError: `given` is not one-dimensional, or does not hold integers or booleans.
    """
    try:
        index = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is a {type(given).__name__}; pass a list or a one-dimensional tensor with an integer for each "
            "sequence."
        ) from error
    if index.ndim != 1 or (index.numel() > 0 and (index.is_floating_point() or index.is_complex())):
        raise ValueError(
            f"{name} is {index.dtype} of shape {tuple(index.shape)}; pass a list or a one-dimensional tensor with an "
            "integer for each sequence."
        )
    return index


def rows_held(layers: Sequence[Any]) -> int:
    """Returns the number of sequences that Transformers' own layers hold; 0 if they are empty."""
    held = [getattr(layer, "keys", None) for layer in layers]
    for layer, name in product(layers, ("conv_states", "recurrent_states")):
        held.extend(getattr(layer, name, {}).values())
    return next((state.shape[0] for state in held if state is not None and state.numel() > 0), 0)
