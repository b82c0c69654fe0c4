"""What a layer of a `DiffKVCache` holds, and says of it; how that comes in and is attended to is in layer.py."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..store import Store, read_tokens
from .awaited import AwaitedTokens
from .errors import NotCapturableError
from .handles import new_handle
from .stores import Stores


class LayerState(CacheLayerMixin):
    """A layer's place in a store, its lengths and copies, and what Transformers asks of a layer beside `update`.

    Args:
        stores: shared by all layers of the cache.
        index: which of the compressed layers this is.
        readers: how many later layers of the model read its keys and values as well.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, stores: Stores, index: int, readers: int = 0) -> None:
        super().__init__()
        self.stores = stores
        self.index = index
        self.readers = readers
        # the forward's tokens while readers are still to attend to them
        self.awaited: AwaitedTokens | None = None
        self.pending: tuple[Tensor, Tensor] | None = None
        self.store: Store | None = None
        self.slot = -1
        self.handle = new_handle(self)

    @property
    def seen(self) -> int:
        """Logical tokens seen: padding and pruned ones included."""
        return self.stores.seen[self.index]

    @seen.setter
    def seen(self, tokens: int) -> None:
        self.stores.seen[self.index] = tokens

    @property
    def keys(self) -> Tensor | None:
        """Dense copy of what is stored, [batch, heads, seen, key_dim]; pruned tokens are zero."""
        return None if self.store is None else read_tokens(self.store, self.slot).keys.to(self.store.dtype)

    @keys.setter
    def keys(self, value: None) -> None:
        """`CacheLayerMixin` initialises this name; there is nothing to keep."""

    @property
    def values(self) -> Tensor | None:
        """Dense copy of what is stored, [batch, heads, seen, value_dim]; pruned tokens are zero."""
        return None if self.store is None else read_tokens(self.store, self.slot).values.to(self.store.dtype)

    @values.setter
    def values(self, value: None) -> None:
        """See `keys`."""

    def __getattr__(self, name: str) -> Any:
        # `Cache.batch_size` expects layers without data to lack the attribute
        if name == "batch_size" and self.__dict__.get("store") is not None:
            return self.store.batch_size
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Finds the layer's place in a store that fits its device and shape."""
        self.store, self.slot = self.stores.place(self.index, key_states, value_states)
        self.is_initialized = True

    def restore(self, seen: int) -> None:
        """Takes up a place that was assigned while loading, `seen` tokens on."""
        self.store, self.slot = self.stores.place_of(self.index)
        self.seen = seen
        self.is_initialized = True

    def __deepcopy__(self, memo: dict) -> LayerState:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        twin.handle = new_handle(twin)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)

    def get_seq_length(self) -> int:
        """See `seen`; what the layers here have seen for a layer that runs in another process."""
        self._check_not_capturing()
        return max(self.stores.seen) if self.index in self.stores.absent else self.seen

    def _check_not_capturing(self) -> None:
        if self.stores.capturing:
            raise NotCapturableError("this model's forward asks for the length of the cache, which every step changes")

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys a mask must cover."""
        tokens = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + tokens, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: no maximum (the older name)."""
        return -1

    def reset(self) -> None:
        """Forgets everything. The store itself is dropped by the cache."""
        self.seen = 0
        self.pending = self.awaited = None
        self.store = None
        self.slot = -1
        self.is_initialized = False

    def offload(self) -> None:
        raise NotImplementedError("DiffKV layers are not offloaded; the compressed cache stays on its device.")

    def prefetch(self) -> None:
        raise NotImplementedError("DiffKV layers are not offloaded; the compressed cache stays on its device.")

    @property
    def is_croppable(self) -> bool:
        """Whether `DiffKVCache.crop` can put the cache back as it was."""
        return self.stores.recording

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("call crop on the DiffKVCache: its layers share one store.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("call reorder_cache on the DiffKVCache: its layers share one store.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("call batch_repeat_interleave on the DiffKVCache: its layers share one store.")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("call batch_select_indices on the DiffKVCache: its layers share one store.")
