"""Transformers' sliding-window layers within captured steps: the tensors of a full window can stay in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from .errors import NotCapturableError

LAYER_KINDS = {"full_attention", "sliding_attention"}


def is_sliding(layer: Any) -> bool:
    """Returns whether a cache layer is Transformers' own sliding-window layer."""
    return type(layer) is DynamicSlidingWindowLayer


class Windows:
    """The sliding-window layers of one cache, if it has any.

    Args:
        layers: layers of the cache.
        text_config: text configuration of the model; its `layer_types` say which masks the model takes.
    """

    def __init__(self, layers: list[Any], text_config: Any) -> None:
        self.layers = [layer for layer in layers if is_sliding(layer)]
        self.sizes = {layer.sliding_window for layer in self.layers}
        self.known = not self.layers or set(getattr(text_config, "layer_types", None) or ()) == LAYER_KINDS

    @property
    def full(self) -> bool:
        """Whether every window is full, so that the next token does not change its size."""
        return not self.layers or (
            self.known
            and len(self.sizes) == 1
            and min(self.sizes) > 1
            and all(layer.is_initialized and not layer.record_past for layer in self.layers)
            and all(layer.keys.shape[2] == layer.sliding_window - 1 for layer in self.layers)
        )

    def addresses(self) -> tuple:
        """Returns addresses and shapes of the windows' tensors, like `Store.addresses`."""
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]

    @property
    def size(self) -> int:
        """Number of tokens that the newest token sees, itself included."""
        (size,) = self.sizes
        return size

    def shown(self, mask: Tensor) -> Tensor:
        """Cuts a mask [batch, length] to the window of the newest token, [batch, 1, 1, window]."""
        return mask[:, None, None, -self.size :]

    def count(self) -> None:
        """Counts one more token."""
        for layer in self.layers:
            layer.cumulative_length += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes layers shift their tokens in place within the block; asking for their length raises an error."""
        replaced = {"update": _update, "get_seq_length": _length, "get_mask_sizes": _length}
        for layer in self.layers:
            vars(layer).update({name: MethodType(method, layer) for name, method in replaced.items()})
        try:
            yield
        finally:
            for layer in self.layers:
                for name in replaced:
                    del vars(layer)[name]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the contents of the windows after the block."""
        held = [(tensor, tensor.clone()) for tensor in self._tensors()]
        try:
            yield
        finally:
            for tensor, before in held:
                tensor.copy_(before)


def _update(
    layer: DynamicSlidingWindowLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    keys = torch.cat([layer.keys, key_states], dim=2)
    values = torch.cat([layer.values, value_states], dim=2)
    layer.keys.copy_(keys[:, :, 1:])
    layer.values.copy_(values[:, :, 1:])
    return keys, values


def _length(layer: DynamicSlidingWindowLayer, *args: Any) -> NoReturn:
    raise NotCapturableError("this model's forward reads the length of the cache, which changes with every step")
