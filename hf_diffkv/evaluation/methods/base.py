"""Interface of a KV cache method for the runner."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...compat import attention_of, is_stateful


@dataclass(frozen=True)
class HeldBytes:
    """Memory of one cache.

    Attributes:
        bytes: memory actually held, including metadata, scores, tables and slack.
        payload_bytes: bytes of codes and uncompressed tokens alone; None if the method cannot tell.
        simulated: whether `bytes` is computed from the kept tokens rather than measured.
        levels: number of tokens by level over all layers and heads; None if the method has no levels.
    """

    bytes: int
    payload_bytes: int | None = None
    simulated: bool = False
    levels: dict[str, int] | None = None


class Method(ABC):
    """A KV cache method."""

    label: str = ""
    # package environment with `name` and `run`, if it cannot run in this one (benchmarks/quality/isolated.py)
    environment: Any = None
    # whether one cache can hold several left-padded documents, each treated as if alone
    batches = False
    # whether several texts may be run at once, separated by a mask (`Session.ask`)
    asks_at_once = True
    # other distributions whose versions affect its figures
    packages: tuple[str, ...] = ("transformers",)

    @abstractmethod
    def new_cache(self, model: Any) -> Any:
        """Makes an empty cache for `model`. Raises an error if it does not support the model."""

    def decided_by(self, model: Any) -> dict[str, Any]:
        """Returns settings that `label` leaves to the model or its files, ready for JSON.

        Raises:
            ValueError, OSError: the method cannot be used with the model.
        """
        return {}

    def branch(self, cache: Any) -> Any:
        """Makes a cache that continues from the same tokens without changing `cache`."""
        twin = copy.copy(cache)
        twin.layers = [branched(layer) for layer in cache.layers]
        return twin

    def held(self, cache: Any) -> HeldBytes:
        """Returns the memory of `cache`."""
        return HeldBytes(tensor_bytes(cache.layers))

    @contextmanager
    def attached(self, model: Any, cache: Any) -> Iterator[None]:
        """Prepares `model` for forwards with `cache` within the block."""
        yield

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r})"


@contextmanager
def using_attention(model: Any, name: str) -> Iterator[None]:
    """Gives `model` the attention implementation `name` within the block."""
    before = attention_of(model.config)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        if before is not None:
            model.set_attn_implementation(before)


def branched(layer: Any) -> Any:
    """Copies a layer of Transformers' dynamic caches so that the copy can continue without changing `layer`."""
    # these layers replace their tensors and never write into them; layers with a state do
    return copy.deepcopy(layer) if hasattr(layer, "conv_states") else copy.copy(layer)


def tensor_bytes(root: Any) -> int:
    """Returns the bytes of all distinct tensors reachable from `root` by attributes, containers and tensor subclasses.

    A view counts as all the memory that it keeps alive. Views in sliding-window layers count only as their own size, as
    the next forward frees the rest.
    """
    storages: dict[int, int] = {}
    within_windows = 0
    seen: set[int] = set()
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            parts = item.__tensor_flatten__()[0] if hasattr(item, "__tensor_flatten__") else ()
            if parts:
                queue += [getattr(item, name) for name in parts]
            else:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, (list, tuple, set)):
            queue += item
        elif type(item).__module__.startswith(("transformers.", "hf_diffkv.")):
            parts = dict(vars(item))
            if getattr(item, "is_sliding", False) is True and item.is_initialized:
                within_windows += sum(parts.pop(name).nbytes for name in ("keys", "values"))
            queue += parts.values()
    return sum(storages.values()) + within_windows


def attends_fully(model: Any) -> bool:
    """Returns whether every layer attends to all earlier tokens, so that one mask fits all layers."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return set(types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None and not is_stateful(model)
