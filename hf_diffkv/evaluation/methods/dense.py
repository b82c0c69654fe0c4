"""Methods for Transformers' `DynamicCache`: `dense`, with which others are compared, and `dense:float32`.

`dense:float32` runs the same weights in float32. Its divergence from `dense` is the effect of the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache

from ..errors import EvaluationError
from . import method
from .base import HeldBytes, Method, tensor_bytes

DENSE = "dense"
FLOAT32 = "float32"


class DenseMethod(Method):
    """Method with the uncompressed cache, sliding windows included."""

    batches = True

    def new_cache(self, model: Any) -> Any:
        return DynamicCache(config=model.config)

    def held(self, cache: Any) -> HeldBytes:
        held = tensor_bytes(cache.layers)
        return HeldBytes(held, held)


class Float32Method(DenseMethod):
    """Method with the uncompressed cache of the model in float32, to which it is converted for each forward."""

    def new_cache(self, model: Any) -> Any:
        if getattr(model, "is_quantized", False):
            raise ValueError(f"{DENSE}:{FLOAT32} needs weights that are not quantised.")
        return super().new_cache(model)

    @contextmanager
    def attached(self, model: Any, cache: Any) -> Iterator[None]:
        # tied weights are one parameter here; buffers of rotary embeddings are float32 already
        kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
        try:
            for tensor, data in kept:
                tensor.data = data.float() if data.is_floating_point() else data
            yield
        finally:
            for tensor, data in kept:
                tensor.data = data


@method(DENSE)
def dense(options: list[str]) -> Method:
    if options not in ([], [FLOAT32]):
        raise EvaluationError(f"method {DENSE!r} has no option but {FLOAT32}: {DENSE}:{FLOAT32}.")
    return Float32Method() if options else DenseMethod()
