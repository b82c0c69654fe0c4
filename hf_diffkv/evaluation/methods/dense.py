"""Transformers' `DynamicCache`: what every other method is compared with."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from ..errors import EvaluationError
from . import method
from .base import HeldBytes, Method, tensor_bytes

DENSE = "dense"


class DenseMethod(Method):
    """The uncompressed cache, sliding windows included."""

    batches = True

    def new_cache(self, model: Any) -> Any:
        return DynamicCache(config=model.config)

    def held(self, cache: Any) -> HeldBytes:
        held = tensor_bytes(cache.layers)
        return HeldBytes(held, held)


@method(DENSE)
def dense(options: list[str]) -> Method:
    if options:
        raise EvaluationError("method 'dense' has no options.")
    return DenseMethod()
