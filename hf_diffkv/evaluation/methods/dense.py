"""Method for Transformers' `DynamicCache`, with which others are compared: `dense`."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import DynamicCache

from . import method
from .base import HeldBytes, Method, tensor_bytes, without_options

DENSE = "dense"


class DenseMethod(Method):
    """Method with the uncompressed cache, sliding windows included."""

    batches = True

    def new_cache(self, model: Any) -> Any:
        return DynamicCache(config=model.config)

    def held(self, cache: Any) -> HeldBytes:
        held = tensor_bytes(cache.layers)
        return HeldBytes(held, held)


method(DENSE)(partial(without_options, DENSE, DenseMethod))
