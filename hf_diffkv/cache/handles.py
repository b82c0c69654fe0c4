"""Layers by number: inside a compiled graph a layer is named by one, which comes as a tensor."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(layer: Any) -> Tensor:
    """int64 [1] on the CPU: a number under which compiled graphs find `layer` while it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number])


def layer_of(handle: Tensor) -> Any:
    """The layer that `new_handle` gave this number."""
    return _layers[int(handle)]


def awaiting_layers() -> list[Any]:
    """Layers of any cache whose keys and values are still to be read by later layers of the model."""
    return [layer for layer in list(_layers.values()) if layer.awaited is not None]
