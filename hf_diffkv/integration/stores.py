"""Which store holds which layer: one per device and head shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import DiffKVConfig, Threshold
from ..store import Store
from ..store.state import LayerThreshold
from .errors import HandOverError

if TYPE_CHECKING:
    from .layer import DiffKVLayer


class Stores:
    """All stores of one cache.

    Args:
        config: the user's choices.
        num_layers: compressed layers of the model.

    Raises:
        ValueError: thresholds given for another number of layers.
    """

    def __init__(self, config: DiffKVConfig, num_layers: int) -> None:
        self.config = config
        self.num_layers = num_layers
        for name in ("alpha_high", "alpha_low"):
            value = getattr(config, name)
            if isinstance(value, tuple) and len(value) != num_layers:
                raise ValueError(
                    f"{name} has {len(value)} entries but {num_layers} layers of this model are compressed; give one "
                    f"number or {num_layers} of them."
                )
        self.stores: list[Store] = []
        # logical tokens each layer has seen; the layers refer to this object, which must not refer back to them, or
        # a cache that is dropped would keep its memory until Python's garbage collector comes by
        self.seen = [0] * num_layers
        self.recording = False
        self.pending: int | None = None
        self.broken = False
        self.order = torch.zeros(1)
        self._places: dict[int, tuple[Store, int]] = {}

    def place(self, index: int, key: Tensor, value: Tensor) -> tuple[Store, int]:
        """The store for a layer's keys and values, and the layer's index in it.

        Raises:
            ValueError: keys and values no store can be made for.
        """
        if key.ndim != 4 or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"keys {tuple(key.shape)} and values {tuple(value.shape)} must be [batch, heads, tokens, head_dim]."
            )
        shape = (key.shape[0], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        for store in self.stores:
            used = sum(place[0] is store for place in self._places.values())
            fits = shape == (
                store.batch_size,
                store.num_heads,
                store.key_dim,
                store.value_dim,
                store.dtype,
                store.device,
            )
            if fits and used < store.num_layers:
                break
        else:
            batch = self.stores[0].batch_size if self.stores else key.shape[0]
            if batch != key.shape[0]:
                raise ValueError(f"this cache holds {batch} sequences but the model was called with {key.shape[0]}.")
            store = Store(self.config, self.num_layers - len(self._places), *shape)
            used = 0
            store.recording = self.recording
        store.set_thresholds(used, _of_layer(self.config.alpha_high, index), _of_layer(self.config.alpha_low, index))
        if store not in self.stores:
            self.stores.append(store)
        self._places[index] = (store, used)
        return self._places[index]

    def check_complete(self) -> None:
        """Raises `HandOverError` unless every layer took part in every forward so far."""
        lengths = {seen for seen in self.seen if seen}
        if self.broken or len(lengths) > 1:
            raise HandOverError(
                "an earlier forward with this cache stopped halfway, so its layers disagree; call cache.reset() and "
                "start over."
            )

    def abandon(self, layer: DiffKVLayer, tokens: int) -> None:
        """Called when a layer failed to store `tokens` tokens: undone if it is the forward's first, else remembered."""
        others = [seen for index, seen in enumerate(self.seen) if index != layer.index and seen]
        if any(seen >= layer.seen for seen in others):
            self.broken = True
            return
        layer.seen -= tokens
        layer.store.withdraw(tokens)
        if not others and layer.seen == 0:
            layer.reset()
            self.clear()

    def assign(self, index: int, store: Store, slot: int) -> None:
        """Says where a layer that was loaded stands."""
        self._places[index] = (store, slot)

    def place_of(self, index: int) -> tuple[Store, int]:
        """Store and index within it of a layer that has a place."""
        return self._places[index]

    def clear(self) -> None:
        """Drops every store and the memory it holds."""
        self.pending = None
        self.broken = False
        self.recording = False
        self.stores.clear()
        self._places.clear()


def _of_layer(value: Threshold, index: int) -> LayerThreshold:
    return value[index] if isinstance(value, tuple) else value
