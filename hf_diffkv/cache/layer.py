"""Layers of a `DiffKVCache`, which take keys and values from the model and hand them to its attention function."""

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
    Changing,
    PromptAttention,
    RecordedAttention,
    StepAttention,
    Store,
    begin_forward,
    check_finite,
    hide_tokens,
    read_tokens,
)
from .awaited import AwaitedTokens
from .errors import HandOverError, NotCapturableError, another_batch
from .handles import new_handle
from .inference import ordinary_tensors
from .stores import Stores, between_forwards

LAYER_TAG = "_diffkv_layer"
# marks keys that their layer does not know of yet
DEFERRED = "_diffkv_deferred"


def reads_are_free(device: torch.device) -> bool:
    """Returns whether the host can read `device` at every step at no cost."""
    return device.type == "cpu"


def _without_gradients() -> AbstractContextManager[None]:
    return ordinary_tensors() if torch.is_inference_mode_enabled() else torch.no_grad()


def _tagged(key: Tensor, value: Tensor, layer: DiffKVLayer) -> tuple[Tensor, Tensor]:
    """Marks fresh aliases with their layer, so that the caller's own tensors stay unmarked."""
    key, value = key.view_as(key), value.view_as(value)
    setattr(key, LAYER_TAG, layer)
    setattr(value, LAYER_TAG, layer)
    return key, value


def _as_attended(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Casts to the dtype that attention uses under autocast, which may differ from the model's."""
    device = key.device.type
    if not torch.is_autocast_enabled(device) or key.dtype == torch.float64:
        return key, value
    dtype = torch.get_autocast_dtype(device)
    return key.to(dtype), value.to(dtype)


class DiffKVLayer(CacheLayerMixin):
    """Compressed counterpart of a Transformers cache layer.

    `update` only announces tokens; the attention function stores them.

    Args:
        stores: stores shared by all layers of the cache.
        index: index of the layer among the model's compressed layers.
        layer_idx: index of the layer in the model.
        readers: number of later layers of the model that also read its keys and values.

    Attributes:
        is_last: whether no layer of the cache comes after it.
        store, slot: the layer's store and its slot there; None and -1 before the first tokens.
        pending: keys and values that wait for their queries.
        awaited: the forward's tokens until all readers have attended to them.
        handle: number by which compiled graphs find the layer, int64 [1].
    """

    is_sliding = False
    is_compileable = False
    # whether keys are rotary keys and values latents (latent.py)
    has_latents = False

    def __init__(self, stores: Stores, index: int, layer_idx: int, readers: int = 0) -> None:
        # not `CacheLayerMixin.__init__`, which sets attributes that are properties here
        self.stores, self.readers, self.index, self.layer_idx = stores, readers, index, layer_idx
        self.is_last = False
        self.store: Store | None = None
        self.slot = -1
        self.pending: tuple[Tensor, Tensor] | None = None
        self.awaited: AwaitedTokens | None = None
        self.handle = new_handle(self)

    @property
    def seen(self) -> int:
        """Number of logical tokens seen, padding and pruned tokens included."""
        return self.stores.seen[self.index]

    def see(self, tokens: int) -> None:
        """Adds `tokens` to the tokens seen; negative numbers subtract."""
        self.stores.seen[self.index] += tokens

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has a place in a store."""
        return self.store is not None

    @property
    def keys(self) -> Tensor | None:
        """Dense copy of the stored keys, [batch, heads, seen, key_dim]; pruned tokens are zero."""
        return self._dense("keys")

    @property
    def values(self) -> Tensor | None:
        """Dense copy of the stored values, [batch, heads, seen, value_dim]; pruned tokens are zero."""
        return self._dense("values")

    @between_forwards
    def _dense(self, name: str) -> Tensor | None:
        if not self.is_initialized:
            return None
        return getattr(read_tokens(self.store, self.slot), name).to(self.store.dtype)

    def __getattr__(self, name: str) -> Any:
        # `Cache.batch_size` expects layers without data to lack the attribute
        if name == "batch_size" and self.__dict__.get("store") is not None:
            return self.store.batch_size
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: a layer gets its place with its first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announces new tokens.

        Args:
            key_states: [batch, heads, tokens, key_dim].
            value_states: [batch, heads, tokens, value_dim].

        Returns:
            Aliases of both tensors, marked so that the attention function finds this layer.

        Raises:
            ValueError: batch size, head count, head_dim, dtype or device differ from before.
            HandOverError: an earlier forward stopped halfway.
            MemoryError: the tokens do not fit.
        """
        return self.announce(key_states, value_states)

    def announce(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs `update` with keys and values in the attention function's order."""
        if torch.compiler.is_compiling():
            if self.readers and not hasattr(cache_utils, "KVSharingDict"):
                raise HandOverError(
                    "in this release of transformers later layers copy the keys and values they share with an earlier "
                    "one, which a compiled graph cannot follow; upgrade transformers, or compile without "
                    "fullgraph=True."
                )
            # the operator in the graph does all of this when it runs; `pending` reveals attention without the operator
            self.stores.pending = self.index
            key, value = _tagged(key_states, value_states, self)
            setattr(key, DEFERRED, True)
            return key, value
        if self.stores.capturing:
            # a captured step repeats only the device's work
            return _tagged(key_states, value_states, self)
        if key_states.is_meta:
            raise ValueError(
                "keys and values are on the meta device, which holds no data; load the model's weights first, for "
                "example with from_pretrained."
            )
        self.stores.reach(self.layer_idx)
        try:
            self.stores.check_read()
            self.stores.check_usable()
            key, value = _as_attended(key_states, value_states)
            with _without_gradients(), self._in_step(key.device, self._may_fail_alone(key.shape[2])):
                self._begin(key, value)
            self.see(key.shape[2])
        except BaseException as error:
            self.stores.give_up(self.index, error)
            raise
        self.pending, self.stores.pending = (key, value), self.index
        return _tagged(key_states, value_states, self)

    def _begin(self, key: Tensor, value: Tensor) -> None:
        """Allocates a slot if needed, and starts the forward if this is its first layer."""
        tokens = key.shape[2]
        if self.store is None:
            self.stores.check_place(tokens)
            self.store, self.slot = self.stores.place(self.index, key, value)
        self._check(key, value)
        if self.store.seen == self.seen:
            if self.stores.starts_forward(self.index):
                self.stores.begin(tokens)
            else:
                begin_forward(self.store, tokens)
        self.stores.share_budget(self.store)

    def _check(self, key: Tensor, value: Tensor) -> None:
        store = self.store
        expected = (store.batch_size, store.num_heads, store.key_dim, store.value_dim)
        given = (key.shape[0], key.shape[1], key.shape[3], value.shape[3])
        if given[0] != expected[0]:
            raise another_batch(expected[0], given[0])
        if given != expected or key.dtype != store.dtype or key.device != store.device:
            raise ValueError(
                f"this cache was made for (batch, heads, key_dim, value_dim)={expected}, {store.dtype} on "
                f"{store.device} but got {given}, {key.dtype} on {key.device}; use a new DiffKVCache, and a new "
                "PrefixStore if it came from one."
            )

    def _may_fail_alone(self, tokens: int) -> bool:
        """Returns whether `update` can fail on one rank but not on another."""
        if not self.is_initialized:
            return True
        begins = self.store.seen == self.seen and self.stores.starts_forward(self.index)
        return begins and (tokens > 1 or any(store.look_due for store in self.stores.all))

    def _in_step(self, device: torch.device, alone: bool) -> AbstractContextManager[None]:
        """Returns `TensorParallel.in_step` if the work may fail on one rank `alone`, which is the same on all ranks."""
        parallel = self.stores.tensor_parallel
        return parallel.in_step(device) if alone and parallel.group is not None else nullcontext()

    def attend(
        self,
        query: Tensor,
        softmax: Softmax,
        valid: Tensor | None = None,
        mask: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> Tensor:
        """Attends with the announced tokens, stores them, updates significance and compresses.

        Args:
            query: [batch, query_heads, tokens, key_dim].
            softmax: scaling, soft capping and attention sinks.
            valid: bool [batch, tokens], False for padding; None if no token is padding.
            mask: bool [batch, 1, tokens, tokens] among the new tokens; None if plainly causal.
            shown: bool [batch, past], past tokens that are visible; None if all are. Hidden tokens are dropped for
                good, even if the forward fails later.

        Returns:
            Output, [batch, query_heads, tokens, value_dim].

        Raises:
            ValueError: keys or values are not finite, or a token is shown that was padding or hidden before.
            MemoryError: the tokens do not fit.
        """
        tokens = query.shape[2]
        alone = self.stores.recording or tokens > 1 or self.seen == tokens
        try:
            with _without_gradients(), self._in_step(query.device, alone):
                output = self._attend(query, softmax, valid, mask, shown)
        except BaseException as error:
            # an interrupt may come when the tokens are already stored
            self.stores.broken |= not isinstance(error, Exception)
            self.abandon(tokens)
            raise
        if self.stores.earlier.open:
            self.stores.earlier.end()
        return output

    def abandon(self, tokens: int) -> None:
        """Takes back `tokens` announced tokens after an error in their attention, or marks the cache as broken."""
        self.pending = self.stores.pending = None
        self.awaited = self.stores.awaited = None
        if self.stores.abandon(self.index, tokens):
            self.reset()

    def _attend(
        self, query: Tensor, softmax: Softmax, valid: Tensor | None, mask: Tensor | None, shown: Tensor | None
    ) -> Tensor:
        """Runs `attend` without error handling."""
        (key, value), self.pending, self.stores.pending = self.pending, None, None
        self._hide(key, value, valid, shown)
        store, tokens = self.store, key.shape[2]
        given, query = query.dtype, query.to(key.dtype)
        new = self._new_tokens(key, value, valid, mask)
        output = new.attend(query, softmax, last=not self.readers)
        with Changing(store):
            if store.padding.length < self.seen:
                store.padding.append(tokens, valid)
            if self.readers:
                self.awaited, self.stores.awaited = AwaitedTokens(key.shape, new, self.readers), self.index
            output = output.to(given)
        return output

    def _hide(self, key: Tensor, value: Tensor, valid: Tensor | None, shown: Tensor | None) -> None:
        """Drops the tokens that the mask hides from now on, before the store's first layer attends.

        On devices other than a CPU, the mask of a one-token step is compared without synchronizing, and the store
        raises the error within a few steps.

        Args:
            key, value: the new tokens' keys and values.
            valid: bool [batch, tokens], which new tokens are real; None if all are.
            shown: bool [batch, past], past tokens that are visible; None if all are.

        Raises:
            ValueError: the mask shows a token that was padding or hidden before, or new keys or values are not finite.
        """
        store = self.store
        same = store.padding.equals(shown) if store.padding.length < self.seen else None
        if same is None:
            return
        if key.shape[2] == 1 and not store.recording and not reads_are_free(store.device):
            store.changed_past |= ~same
            return
        if bool(same):
            return
        if shown is None or bool((shown & ~store.padding.mask()).any()):
            raise ValueError(
                "the attention mask shows tokens that were padding or hidden before, whose keys and values this cache "
                "does not hold; pass an attention_mask with 0 wherever earlier ones had it, or use a new cache."
            )
        check_finite(store, key, value, valid)
        hide_tokens(store, shown)

    def _new_tokens(
        self, key: Tensor, value: Tensor, valid: Tensor | None, mask: Tensor | None
    ) -> PromptAttention | StepAttention | RecordedAttention:
        """Hands new tokens to the store. Raises `ValueError` if keys or values are not finite."""
        inputs = (self.store, self.slot, key, value)
        if self.store.recording:
            return RecordedAttention(*inputs, valid, mask, self.readers)
        if key.shape[2] == 1 and self.seen > 1:
            return StepAttention(*inputs, None if valid is None else valid[:, 0])
        return PromptAttention(*inputs, valid, mask)

    def done(self) -> None:
        """Ends the forward if all layers have their tokens; a captured step ends by itself."""
        turns = self.stores.turns
        if self.is_last or turns.last_layer_came:
            turns.layer_done(self.is_last, self.stores.awaited is not None)

    def expect(self, mask: Tensor | None) -> None:
        """Notes the attention mask of the tokens just attended, which later readers must share."""
        if self.awaited is not None:
            self.awaited.mask = mask

    def attend_captured(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax
    ) -> Tensor:
        """Runs the device's part of `attend` for one new token per request.

        Args:
            query: [batch, query_heads, 1, key_dim]; key and value likewise with KV heads.
            mask: bool [batch, 1, 1, 1], whether the new token is real; used only if the step was given a mask.

        Returns:
            Output, [batch, query_heads, 1, value_dim].

        Raises:
            NotCapturableError: later layers read this layer's keys and values.
        """
        if self.readers:
            raise NotCapturableError("later layers of this model read the keys and values of an earlier one")
        if self.stores.rehearsing:
            return query.new_zeros(*query.shape[:3], value.shape[3])
        valid = mask[:, 0, -1, -1] if self.stores.capturing_mask else None
        new = StepAttention(self.store, self.slot, key, value, valid)
        return new.attend(query.to(key.dtype), softmax).to(query.dtype)

    def read(self, query: Tensor, key: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
        """Attends for a later layer that reads the keys and values of this one.

        The last reader stores and compresses the forward's tokens.

        Args:
            query: [batch, query_heads, n, key_dim] of the newest n tokens.
            key: [batch, heads, tokens, key_dim] of all new tokens.
            mask: mask that the attention function was given.
            softmax: scaling, soft capping and attention sinks.

        Returns:
            Output, [batch, query_heads, n, value_dim].

        Raises:
            HandOverError: no further reader was expected, or the reader's mask, shapes or device differ from the
                storing layer's.
            MemoryError: the tokens do not fit.
        """
        awaited = self.awaited
        if awaited is None:
            raise HandOverError(
                "a layer reads keys and values that are already stored: more layers share them than the model's "
                "configuration states, so it cannot use DiffKVCache."
            )
        try:
            with _without_gradients(), self._in_step(query.device, self.stores.recording or key.shape[2] > 1):
                awaited.check(query, key, mask)
                awaited.left -= 1
                last = awaited.left == 0
                if last:
                    self.awaited = self.stores.awaited = None
                return awaited.tokens.attend(query.to(self.store.dtype), softmax, last).to(query.dtype)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Marks the cache as broken after a reader failed, as earlier layers have already stored the tokens."""
        self.awaited = self.stores.awaited = None
        self.stores.broken = True
        self.stores.turns.end()

    def restore(self, store: Store, slot: int, seen: int) -> None:
        """Takes the place assigned while loading, with `seen` tokens."""
        self.store, self.slot, self.stores.seen[self.index] = store, slot, seen

    def reset(self) -> None:
        """Forgets all tokens. The cache drops the stores themselves."""
        self.pending = self.awaited = self.store = None
        self.slot, self.stores.seen[self.index] = -1, 0

    def __deepcopy__(self, memo: dict) -> DiffKVLayer:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)

    def get_seq_length(self) -> int:
        """Returns `seen`, or, for a layer that runs in another process, the most that layers here have seen."""
        if self.stores.capturing:
            raise NotCapturableError(
                "this model's forward reads the length of the cache, which changes with every step"
            )
        return max(self.stores.seen) if self.index in self.stores.absent else self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Returns length and offset of the keys that a mask must cover."""
        tokens = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + tokens, 0

    def get_max_length(self) -> int:
        """Returns -1, no maximum."""
        return -1

    # older name
    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        raise NotImplementedError("DiffKV layers are not offloaded; the compressed cache stays on its device.")

    prefetch = offload

    @property
    def is_croppable(self) -> bool:
        """Whether `DiffKVCache.crop` can restore an earlier state."""
        return self.stores.recording

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("call crop on the DiffKVCache: its layers share one store.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("call reorder_cache on the DiffKVCache: its layers share one store.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("call batch_repeat_interleave on the DiffKVCache: its layers share one store.")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("call batch_select_indices on the DiffKVCache: its layers share one store.")
