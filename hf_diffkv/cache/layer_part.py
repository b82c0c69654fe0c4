"""Parts of a layer: its head groups, the splitting of tensors by group, and the checks of shared keys and values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..config.head_groups import HeadGroup
from ..ops.softmax import Softmax
from ..store import (
    Read,
    Recorded,
    SharedRecording,
    SharedStep,
    SharedTokens,
    Store,
    attend_recorded,
    attend_token,
    attend_tokens,
    begin_forward,
    check_finite,
    hide_tokens,
)
from ..store.state import reads_are_free
from .errors import HandOverError
from .stores import Stores, wrong_heads


class LayerPart:
    """One head group of a layer, usually all its heads, whose tokens are kept in one store.

    Args:
        stores: shared by all layers of the cache.
        index: index of the group in `Stores.groups`.
        readers: number of later layers of the model that also read its keys and values.

    Attributes:
        store, slot: the group's store and its layer slot there; None and -1 before the first tokens.
        shared: the forward's tokens until all readers have attended to them.
    """

    def __init__(self, stores: Stores, index: int, readers: int) -> None:
        self.stores, self.index, self.readers = stores, index, readers
        self.store: Store | None = None
        self.slot = -1
        self.shared: SharedStep | SharedTokens | SharedRecording | None = None

    @property
    def seen(self) -> int:
        """Number of logical tokens seen, padding and pruned tokens included."""
        return self.stores.seen[self.index]

    def see(self, tokens: int) -> None:
        """Adds `tokens` to the tokens seen; negative numbers subtract."""
        self.stores.seen[self.index] += tokens

    def begin(self, key: Tensor, value: Tensor) -> None:
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
            raise ValueError(
                f"this cache holds {expected[0]} sequences but the model was called with {given[0]}; use a new "
                "DiffKVCache for another batch, or call batch_repeat_interleave or batch_select_indices first."
            )
        if given != expected or key.dtype != store.dtype or key.device != store.device:
            raise ValueError(
                f"this cache was made for (batch, heads, key_dim, value_dim)={expected}, {store.dtype} on "
                f"{store.device} but got {given}, {key.dtype} on {key.device}; use a new DiffKVCache."
            )

    def hide(self, key: Tensor, value: Tensor, valid: Tensor | None, shown: Tensor | None) -> None:
        """Drops the tokens that the mask hides from now on, before the store's first layer attends.

        On devices other than a CPU, a step of one token is compared without synchronizing, and the store raises the
        error within a few steps.

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

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax: Softmax,
        valid: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Attends with this group's new tokens and stores them, after `hide`; arguments as in `DiffKVLayer.attend`."""
        store, tokens = self.store, key.shape[2]
        given, query = query.dtype, query.to(key.dtype)
        inputs = (store, self.slot, query, key, value)
        with torch.no_grad():
            if self.readers:
                self.shared = self._share(key, value, valid, mask)
                output = self.shared.attend(query, False, softmax)
            elif store.recording:
                output = attend_recorded(store, self.slot, Recorded(key, value, valid, mask, (Read(query, softmax),)))
            elif tokens == 1 and self.seen > 1:
                output = attend_token(*inputs, softmax, None if valid is None else valid[:, 0])
            else:
                output = attend_tokens(*inputs, softmax, valid, mask)
        if store.padding.length < self.seen:
            store.padding.append(tokens, valid)
        return output.to(given)

    def _share(
        self, key: Tensor, value: Tensor, valid: Tensor | None, mask: Tensor | None
    ) -> SharedStep | SharedTokens | SharedRecording:
        """Wraps new tokens that later layers also read. Raises `ValueError` if keys or values are not finite."""
        inputs = (self.store, self.slot, key, value)
        if self.store.recording:
            return SharedRecording(*inputs, valid, mask, self.readers)
        if key.shape[2] == 1 and self.seen > 1:
            return SharedStep(*inputs, None if valid is None else valid[:, 0])
        return SharedTokens(*inputs, valid, mask)

    def read(self, query: Tensor, softmax: Softmax, last: bool) -> Tensor:
        """Attends for a later layer that reads this group's tokens; `last`: whether it is the last reader."""
        shared = self.shared
        if last:
            self.shared = None
        with torch.no_grad():
            return shared.attend(query.to(self.store.dtype), last, softmax).to(query.dtype)

    def restore(self, seen: int) -> None:
        """Takes the place that was assigned while loading, with `seen` tokens."""
        self.store, self.slot = self.stores.place_of(self.index)
        self.stores.seen[self.index] = seen

    def reset(self) -> None:
        """Forgets the store and all tokens."""
        self.stores.seen[self.index] = 0
        self.store = self.shared = None
        self.slot = -1


@dataclass
class AwaitedTokens:
    """New tokens that later layers have yet to read.

    Attributes:
        shape: shape of the keys, [batch, heads, tokens, key_dim].
        left: number of readers still to come.
        mask: attention mask that the storing layer was given.
        thread: identifier of the thread in which the storing layer attended.
    """

    shape: torch.Size
    left: int
    mask: Tensor | None = None
    thread: int = field(default_factory=threading.get_ident)

    def check(self, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        """Raises `HandOverError` unless a reader's mask, shapes and device match the storing layer's.

        Args:
            query: [batch, query_heads, n, key_dim] of the newest n tokens.
            key: [batch, heads, tokens, key_dim].
            mask: the reader's mask, which may be cut to the newest n tokens.
        """
        count, earlier = query.shape[2], self.shape[2] - query.shape[2]
        fits = earlier >= 0 and self.shape == key.shape and query.device == key.device
        if not (fits and self._is_same(mask, count)):
            raise HandOverError(
                "a layer that reads the keys and values of an earlier layer has another attention mask, or runs on "
                "another device; such a model cannot use DiffKVCache."
            )
        if count > 1 and earlier and mask is not None and mask.ndim == 4:
            part = mask[..., -self.shape[2] :][..., :earlier]
            if not bool((part == part[:, :, -1:]).all()):
                raise HandOverError(
                    "this attention mask hides some new tokens from some of the last ones only, where layers that "
                    "read the keys and values of an earlier layer attend from those alone; pass logits_to_keep=0."
                )

    def _is_same(self, mask: Tensor | None, count: int) -> bool:
        if mask is None or self.mask is None:
            return mask is self.mask
        whole = self.mask if mask.ndim == 2 or mask.shape[-2] != count else self.mask[..., -count:, :]
        if mask.shape != whole.shape or mask.device != whole.device:
            return False
        # the comparison of values reads the device; steps of one token do not get there
        return (mask.data_ptr(), mask.stride()) == (whole.data_ptr(), whole.stride()) or bool((mask == whole).all())


class SplitHeads:
    """Splits tensors of a layer by head group and joins them again.

    Args:
        groups: groups that together contain all heads of the layer.
    """

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        self.layer = groups[0].layer
        self._heads = [torch.tensor(group.heads) for group in groups]
        self._order = torch.cat(self._heads).argsort()
        # indices by device, as none may be created within a captured step
        self._moved: dict[torch.device, list[Tensor]] = {}

    @property
    def count(self) -> int:
        """Number of KV heads of the layer."""
        return self._order.numel()

    def check(self, heads: int) -> None:
        """Raises `ValueError` unless the layer has `heads` KV heads."""
        if heads != self.count:
            raise wrong_heads(self.layer, self.count, heads)

    def apart(self, tensor: Tensor, dim: int = 1) -> list[Tensor]:
        """Splits `tensor` by head group along `dim`, which holds KV heads or query heads."""
        whole, (*indices, _) = tensor.unflatten(dim, (self.count, -1)), self._on(tensor.device)
        return [whole.index_select(dim, index).flatten(dim, dim + 1) for index in indices]

    def softmaxes(self, softmax: Softmax) -> list[Softmax]:
        """Returns the softmax of each group's query heads."""
        if softmax.sinks is None:
            return [softmax] * len(self._heads)
        return [replace(softmax, sinks=sinks) for sinks in self.apart(softmax.sinks, 0)]

    def together(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Joins tensors that `apart` split."""
        pairs = zip(parts, self._heads)
        whole = torch.cat([part.unflatten(dim, (heads.numel(), -1)) for part, heads in pairs], dim)
        return whole.index_select(dim, self._on(whole.device)[-1]).flatten(dim, dim + 1)

    def _on(self, device: torch.device) -> list[Tensor]:
        if device not in self._moved:
            self._moved[device] = [index.to(device) for index in (*self._heads, self._order)]
        return self._moved[device]
