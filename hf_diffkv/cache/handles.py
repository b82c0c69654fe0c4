"""Layers by number: a compiled graph identifies a layer by a number, passed as a tensor."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(layer: Any) -> Tensor:
    """Assigns a number, int64 [1] on the CPU, by which compiled graphs find `layer` while it exists."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number], device="cpu")


def layer_of(handle: Tensor) -> Any:
    """Returns the layer to which `new_handle` gave this number."""
    return _layers[int(handle)]


def awaiting_layers() -> list[Any]:
    """Returns the layers, of all caches, whose keys and values later layers have yet to read."""
    return [layer for layer in list(_layers.values()) if layer.awaited is not None]
