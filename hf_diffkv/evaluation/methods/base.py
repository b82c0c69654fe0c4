"""What the runner asks of a way to hold a KV cache."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...compat import is_stateful


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one cache.

    Attributes:
        bytes: what is really held: metadata, scores, tables and slack included.
        payload_bytes: codes and uncompressed tokens alone, where a method can tell.
        simulated: whether `bytes` is computed from kept tokens and not held.
        levels: tokens per level over all layers and heads, where a method has levels.
    """

    bytes: int
    payload_bytes: int | None = None
    simulated: bool = False
    levels: dict[str, int] | None = None

    def share(self, part: float) -> HeldBytes:
        """`part` of it all."""
        return HeldBytes(
            round(self.bytes * part),
            None if self.payload_bytes is None else round(self.payload_bytes * part),
            self.simulated,
            None if self.levels is None else {name: round(count * part) for name, count in self.levels.items()},
        )


class Method(ABC):
    """One way to hold a KV cache."""

    label: str = ""
    # the environment it runs in, where it cannot run in this one
    environment: str | None = None
    # its cache forgets tokens and does not count them: generate() would give those to come wrong positions
    drops_tokens = False
    # one cache takes several documents, padded on the left, each as if it were alone
    batches = False
    # padding is held like any other token
    stores_padding = True
    # whether several texts may go in at once, kept apart by a mask; see `Session.ask`
    asks_at_once = True
    # distributions whose versions decide what it does, beside this one
    packages: tuple[str, ...] = ("transformers",)

    @abstractmethod
    def new_cache(self, model: Any) -> Any:
        """An empty cache for `model`. Raises where the model does not work with it."""

    def decided_by(self, model: Any) -> dict[str, Any]:
        """What `label` leaves open and the model, or files beside it, decide; ready for JSON.

        Raises `ValueError` or `OSError` where the method cannot be used with the model.
        """
        return {}

    def branch(self, cache: Any) -> Any:
        """A cache that continues from the same tokens without changing `cache`."""
        twin = copy.copy(cache)
        twin.layers = [branched(layer) for layer in cache.layers]
        return twin

    def held(self, cache: Any) -> HeldBytes:
        """What `cache` takes, in bytes."""
        return HeldBytes(tensor_bytes(cache.layers))

    @contextmanager
    def attached(self, model: Any, cache: Any) -> Iterator[None]:
        """Around every forward of `model` with `cache`."""
        yield

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r})"


def branched(layer: Any) -> Any:
    """A layer of Transformers' dynamic caches that goes on without changing `layer`."""
    # they replace their tensors and never write into them; those with a state do
    return copy.deepcopy(layer) if hasattr(layer, "conv_states") else copy.copy(layer)


def tensor_bytes(root: Any) -> int:
    """Bytes of all distinct tensors reachable from `root` through attributes, containers and tensor subclasses.

    A view counts as all of the memory that it keeps from being freed, but for those of sliding-window layers: they look
    at what the last forward saw, which the next forward frees.
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
    """Whether every layer attends to all tokens before, so that one mask says it for all."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return set(types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None and not is_stateful(model)
