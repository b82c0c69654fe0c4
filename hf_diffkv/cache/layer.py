"""Layers of a `DiffKVCache`: take keys and values from the model, and hand them to its attention function."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin

from ..ops.softmax import Softmax
from ..store import (
    Recorded,
    Store,
    attend_recorded,
    attend_token,
    attend_tokens,
    begin_forward,
    check_finite,
    hide_tokens,
    read_tokens,
)
from .awaited import AwaitedTokens, await_readers
from .errors import HandOverError, NotCapturableError
from .handles import new_handle
from .stores import Stores

LAYER_TAG = "_diffkv_layer"
# marks keys whose layer has not been told of them yet
DEFERRED = "_diffkv_deferred"


def _tagged(key: Tensor, value: Tensor, layer: CompressedLayer) -> tuple[Tensor, Tensor]:
    """Fresh aliases, so that the caller's own tensors stay unmarked."""
    key, value = key.view_as(key), value.view_as(value)
    setattr(key, LAYER_TAG, layer)
    setattr(value, LAYER_TAG, layer)
    return key, value


def _as_attended(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast the tensors in the dtype that attention would give them, which need not be that of the model."""
    device = key.device.type
    if not torch.is_autocast_enabled(device) or key.dtype == torch.float64:
        return key, value
    dtype = torch.get_autocast_dtype(device)
    return key.to(dtype), value.to(dtype)


class CompressedLayer(CacheLayerMixin):
    """Stands for a layer of Transformers' own. `update` only announces tokens; the attention function stores them.

    Attributes:
        stores: shared by all layers of the cache.
        index: of its first group of heads, among all groups (`Stores.groups`).
        handle: the number under which compiled graphs find it.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    stores: Stores
    index: int
    readers: int
    handle: Tensor
    store: Store | None
    pending: Any
    awaited: AwaitedTokens | None

    @property
    def parts(self) -> list[Any]:
        """What takes the tokens of each group of its heads."""
        raise NotImplementedError

    @property
    def seen(self) -> int:
        """Logical tokens seen: padding and pruned ones included."""
        return self.stores.seen[self.index]

    def __getattr__(self, name: str) -> Any:
        # `Cache.batch_size` expects layers without data to lack the attribute
        if name == "batch_size" and self.__dict__.get("store") is not None:
            return self.store.batch_size
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announces new tokens.

        Args:
            key_states: [batch, heads, tokens, key_dim]; value_states: [batch, heads, tokens, value_dim].

        Returns:
            The same tensors, marked so that the attention function finds this layer.

        Raises:
            ValueError: a batch size, head count, head_dim, dtype or device other than before.
        """
        if torch.compiler.is_compiling():
            if self.readers and not hasattr(cache_utils, "KVSharingDict"):
                raise HandOverError(
                    "in this release of transformers later layers copy the keys and values they share with an earlier "
                    "one, which a compiled graph cannot follow; upgrade transformers, or compile without "
                    "fullgraph=True."
                )
            # the operator in the graph does all of this when it runs; an attention function without it is found out
            self.stores.pending = self.index
            key, value = _tagged(key_states, value_states, self)
            setattr(key, DEFERRED, True)
            return key, value
        if self.stores.capturing:
            # a captured step repeats the device's work alone
            return _tagged(key_states, value_states, self)
        if key_states.is_meta:
            raise ValueError(
                "keys and values are on the meta device, which holds no data; load the model's weights first, for "
                "example with from_pretrained."
            )
        self.stores.check_read()
        self.stores.check_usable()
        key, value = _as_attended(key_states, value_states)
        try:
            with self._in_step(key.device, self._may_fail_alone(key.shape[2])):
                self.begin(key, value)
        except MemoryError:
            # what other layers or ranks have done for this forward cannot be undone from here
            self.stores.broken |= self.stores.tensor_parallel.size > 1 or not self.stores.starts_forward(self.index)
            raise
        self.take(key, value)
        return _tagged(key_states, value_states, self)

    def _may_fail_alone(self, tokens: int) -> bool:
        """Whether `update` can fail on one rank and not on another."""
        if not self.is_initialized:
            return True
        begins = self.store.seen == self.seen and self.stores.starts_forward(self.index)
        return begins and (tokens > 1 or any(store.look_due for store in self.stores.all))

    def _in_step(self, device: torch.device, alone: bool) -> AbstractContextManager[None]:
        """`TensorParallel.in_step` for work that may fail on one rank `alone`, which is the same on every rank."""
        parallel = self.stores.tensor_parallel
        return parallel.in_step(device) if alone and parallel.group is not None else nullcontext()

    def begin(self, key: Tensor, value: Tensor) -> None:
        """Has there be a place for new tokens, as `update` gets them, and starts the forward with the first layer."""
        raise NotImplementedError

    def take(self, key: Tensor, value: Tensor) -> None:
        """Keeps new tokens until their queries come."""
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        softmax: Softmax,
        valid: Tensor | None = None,
        mask: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> Tensor:
        """Attention of the announced tokens; stores them, updates significance, compresses.

        Args:
            query: [batch, query_heads, tokens, key_dim].
            valid: bool [batch, tokens], None where no token is padding.
            mask: bool [batch, 1, tokens, tokens] where attention among the new tokens is not plainly causal.
            shown: bool [batch, past], tokens seen before that are attended, None where all are. Those hidden are
                dropped for good, even if the forward fails later.

        Returns:
            [batch, query_heads, tokens, value_dim].

        Raises:
            ValueError: keys or values that are not finite, or a token is shown that was padding or hidden before.
            MemoryError: the tokens do not fit.
        """
        tokens = query.shape[2]
        alone = self.stores.recording or tokens > 1 or self.seen == tokens
        try:
            with self._in_step(query.device, alone):
                return self.store_pending(query, softmax, valid, mask, shown)
        except BaseException:
            self.pending = self.stores.pending = None
            self.forget_awaited()
            if self.stores.abandon(self.index, tokens):
                self.reset()
            raise

    def store_pending(
        self, query: Tensor, softmax: Softmax, valid: Tensor | None, mask: Tensor | None, shown: Tensor | None
    ) -> Tensor:
        """What `attend` does, whatever becomes of errors."""
        raise NotImplementedError

    def read(self, query: Tensor, key: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
        """Attention of a later layer that reads the keys and values of this one.

        The last of them has the forward's tokens stored and compressed.

        Args:
            query: [batch, query_heads, n, key_dim] of the newest n tokens.
            key: all new ones, [batch, heads, tokens, key_dim]; mask: as the attention function gets it.

        Returns:
            [batch, query_heads, n, value_dim].

        Raises:
            HandOverError: no further layer should read them, or this one is not to see what the storing layer saw.
            MemoryError: the tokens do not fit.
        """
        if self.awaited is None:
            raise HandOverError(
                "a layer reads keys and values that are stored already: more layers share them than the model's "
                "configuration says, so it cannot use DiffKVCache."
            )
        try:
            with self._in_step(query.device, self.stores.recording or key.shape[2] > 1):
                return self.read_awaited(query, key, mask, softmax)
        except BaseException:
            self.give_up()
            raise

    def read_awaited(self, query: Tensor, key: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
        """What `read` does, whatever becomes of errors."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Called when a reader failed: the layers before it have stored the forward's tokens already."""
        self.forget_awaited()
        self.stores.broken = True

    def forget_awaited(self) -> None:
        """Has no reader come any more."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict) -> Any:
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


class DiffKVLayer(CompressedLayer):
    """Stores and compresses the tokens of a layer, or of a group of its heads, in one store.

    Args:
        stores: shared by all layers of the cache.
        index: which of `Stores.groups` this is.
        readers: how many later layers of the model read its keys and values as well.
    """

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
    def parts(self) -> list[DiffKVLayer]:
        """This layer."""
        return [self]

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

    def begin(self, key: Tensor, value: Tensor) -> None:
        """As `CompressedLayer.begin`."""
        tokens = key.shape[2]
        if not self.is_initialized:
            self.stores.check_place(tokens)
            self.lazy_initialization(key, value)
        self._check(key, value)
        if self.store.seen == self.seen:
            if self.stores.starts_forward(self.index):
                self.stores.begin(tokens)
            else:
                begin_forward(self.store, tokens)
        self.stores.share_budget(self.store)

    def take(self, key: Tensor, value: Tensor) -> None:
        """As `CompressedLayer.take`."""
        self.see(key.shape[2])
        self.pending = (key, value)
        self.stores.pending = self.index

    def see(self, tokens: int) -> None:
        """Counts `tokens` further tokens as seen, or fewer where they are negative."""
        self.stores.seen[self.index] += tokens

    def _check(self, key: Tensor, value: Tensor) -> None:
        store = self.store
        expected = (store.batch_size, store.num_heads, store.key_dim, store.value_dim)
        given = (key.shape[0], key.shape[1], key.shape[3], value.shape[3])
        if given[0] != expected[0]:
            raise ValueError(
                f"this cache holds {expected[0]} sequences but the model was called with {given[0]}; use a new "
                "DiffKVCache for another batch, or call batch_repeat_interleave or batch_select_indices first."
            )
        if given != expected or key.dtype != store.dtype or key.device != store.device:
            raise ValueError(
                f"this cache was made for (batch, heads, key_dim, value_dim)={expected}, {store.dtype} on "
                f"{store.device} but got {given}, {key.dtype} on {key.device}; use a new DiffKVCache."
            )

    def store_pending(
        self, query: Tensor, softmax: Softmax, valid: Tensor | None, mask: Tensor | None, shown: Tensor | None
    ) -> Tensor:
        """As `CompressedLayer.store_pending`."""
        key, value = self.pending
        self.pending = self.stores.pending = None
        if self.store.padding.length < self.seen:
            self._hide(key, value, valid, shown)
        return self._attend(query, key, value, valid, mask, softmax)

    def _hide(self, key: Tensor, value: Tensor, valid: Tensor | None, shown: Tensor | None) -> None:
        """Before the store's first layer attends: drops what the mask hides from now on."""
        shown = self.store.check_shown(shown, key.shape[2])
        if shown is not None:
            check_finite(self.store, key, value, valid)
            hide_tokens(self.store, shown)

    def attend_captured(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        softmax: Softmax,
    ) -> Tensor:
        """What of `attend` happens on the device for one new token per request.

        Args:
            mask: bool [batch, 1, 1, 1], whether the new token is real; used where the step was given a mask.
        """
        if self.readers:
            raise NotCapturableError("later layers of this model read the keys and values of an earlier one")
        if self.stores.rehearsing:
            return query.new_zeros(*query.shape[:3], value.shape[3])
        valid = mask[:, 0, -1, -1] if self.stores.capturing_mask else None
        output = attend_token(self.store, self.slot, query.to(key.dtype), key, value, softmax, valid)
        return output.to(query.dtype)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        mask: Tensor | None,
        softmax: Softmax,
    ) -> Tensor:
        store, tokens = self.store, key.shape[2]
        given, query = query.dtype, query.to(key.dtype)
        inputs = (store, self.slot, query, key, value)
        with torch.no_grad():
            if self.readers:
                awaited = await_readers(store, self.slot, key, value, valid, mask, self.seen - tokens, self.readers)
                output = awaited.shared.attend(query, False, softmax)
                self.awaited, self.stores.awaited = awaited, self.index
            elif store.recording:
                recorded = Recorded(query, key, value, valid, mask, softmax)
                output = attend_recorded(store, self.slot, recorded)
            elif tokens == 1 and self.seen > 1:
                output = attend_token(*inputs, softmax, None if valid is None else valid[:, 0])
            else:
                output = attend_tokens(*inputs, softmax, valid, mask)
        if store.padding.length < self.seen:
            store.padding.append(tokens, valid)
        return output.to(given)

    def expect(self, mask: Tensor | None) -> None:
        """Notes the attention mask of the tokens just attended, which readers still to come must have too."""
        if self.awaited is not None:
            self.awaited.mask = mask

    def read_awaited(self, query: Tensor, key: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
        """As `CompressedLayer.read_awaited`."""
        awaited = self.awaited
        awaited.check(query, key, mask)
        awaited.left -= 1
        if awaited.left == 0:
            self.awaited = self.stores.awaited = None
        with torch.no_grad():
            return awaited.shared.attend(query.to(self.store.dtype), awaited.left == 0, softmax).to(query.dtype)

    def forget_awaited(self) -> None:
        """Has no reader come any more."""
        self.awaited = self.stores.awaited = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Finds the layer's place in a store that fits its device and shape."""
        self.store, self.slot = self.stores.place(self.index, key_states, value_states)
        self.is_initialized = True

    def restore(self, seen: int) -> None:
        """Takes up a place that was assigned while loading, `seen` tokens on."""
        self.store, self.slot = self.stores.place_of(self.index)
        self.stores.seen[self.index] = seen
        self.is_initialized = True

    def reset(self) -> None:
        """Forgets everything. The store itself is dropped by the cache."""
        self.stores.seen[self.index] = 0
        self.pending = self.awaited = None
        self.store = None
        self.slot = -1
        self.is_initialized = False
