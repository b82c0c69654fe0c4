"""A layer of which some heads have a precision each and others choose tokens: a `DiffKVLayer` for either group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops.softmax import Softmax
from ..store import Store
from .awaited import AwaitedTokens
from .handles import new_handle
from .layer import CompressedLayer, DiffKVLayer
from .split_heads import SplitHeads
from .stores import Stores


class SplitLayer(CompressedLayer):
    """Hands the heads of each group to a layer of their own, one group after another.

    Args:
        stores: shared by all layers of the cache.
        parts: which take the tokens of each group.
        readers: how many later layers of the model read its keys and values as well.
    """

    def __init__(self, stores: Stores, parts: list[DiffKVLayer], readers: int = 0) -> None:
        super().__init__()
        self.stores, self.readers = stores, readers
        self._parts = parts
        self.heads = SplitHeads([stores.groups[part.index] for part in parts])
        # keys and values of each group, until their queries come
        self.pending: list[tuple[Tensor, Tensor]] | None = None
        self._shape: torch.Size | None = None
        self.handle = new_handle(self)

    @property
    def parts(self) -> list[DiffKVLayer]:
        """What takes the tokens of each group of its heads."""
        return self._parts

    @property
    def index(self) -> int:  # type: ignore[override]
        """Of its first group of heads."""
        return self._parts[0].index

    @property
    def store(self) -> Store | None:  # type: ignore[override]
        """Of its first group of heads, None while nothing is held."""
        return self._parts[0].store

    @property
    def is_initialized(self) -> bool:
        """Whether every group has a place."""
        return all(part.is_initialized for part in self._parts)

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """`CacheLayerMixin` initialises this name; the parts know."""

    def __getattr__(self, name: str) -> Any:
        if name == "batch_size" and "_parts" in self.__dict__ and self.store is not None:
            return self.store.batch_size
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def keys(self) -> Tensor | None:
        """Dense copy of what is stored, [batch, heads, seen, key_dim]; pruned tokens are zero."""
        return self.heads.together([part.keys for part in self._parts]) if self.is_initialized else None

    @keys.setter
    def keys(self, value: None) -> None:
        """`CacheLayerMixin` initialises this name; there is nothing to keep."""

    @property
    def values(self) -> Tensor | None:
        """Dense copy of what is stored, [batch, heads, seen, value_dim]; pruned tokens are zero."""
        return self.heads.together([part.values for part in self._parts]) if self.is_initialized else None

    @values.setter
    def values(self, value: None) -> None:
        """See `keys`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is to be done: the parts find their places with their first tokens."""

    def begin(self, key: Tensor, value: Tensor) -> None:
        """As `CompressedLayer.begin`, for the groups of which there is no choice but to take them at once."""
        self.heads.check(key.shape[1])
        for part, given in zip(self._at_once, zip(self.heads.apart(key), self.heads.apart(value))):
            part.begin(*given)

    @property
    def _at_once(self) -> list[DiffKVLayer]:
        """Those that begin together: all where later layers read the tokens.

        Else a group begins when the one before it has attended, so that an error in the first can be undone.
        """
        return self._parts if self.readers else self._parts[:1]

    def take(self, key: Tensor, value: Tensor) -> None:
        """As `CompressedLayer.take`."""
        self._shape = key.shape
        self.pending = list(zip(self.heads.apart(key), self.heads.apart(value)))
        for part, given in zip(self._at_once, self.pending):
            part.take(*given)

    def store_pending(
        self, query: Tensor, softmax: Softmax, valid: Tensor | None, mask: Tensor | None, shown: Tensor | None
    ) -> Tensor:
        """As `CompressedLayer.store_pending`, one group after another."""
        pending, self.pending = self.pending, None
        queries = zip(self.heads.apart(query), self.heads.softmaxes(softmax))
        outputs: list[Tensor] = []
        for part, given, of_part in zip(self._parts, pending or (), queries):
            try:
                if part.pending is None:
                    part.begin(*given)
                    part.take(*given)
                outputs.append(part.store_pending(*of_part, valid, mask, shown))
            except BaseException:
                # what earlier groups stored cannot be taken back
                self.stores.broken |= bool(outputs)
                raise
        return self.heads.together(outputs)

    def attend_captured(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax
    ) -> Tensor:
        """As `DiffKVLayer.attend_captured`."""
        tensors = zip(*map(self.heads.apart, (query, key, value)))
        inputs = zip(self._parts, tensors, self.heads.softmaxes(softmax))
        return self.heads.together([part.attend_captured(*given, mask, own) for part, given, own in inputs])

    @property
    def awaited(self) -> AwaitedTokens | None:
        """The forward's tokens while readers are still to attend to them."""
        awaited = self._parts[-1].awaited
        return None if awaited is None or self._shape is None else replace(awaited, shape=self._shape)

    def expect(self, mask: Tensor | None) -> None:
        """As `DiffKVLayer.expect`."""
        for part in self._parts:
            part.expect(mask)

    def read_awaited(self, query: Tensor, key: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
        """As `CompressedLayer.read_awaited`."""
        inputs = zip(self._parts, self.heads.apart(query), self.heads.apart(key), self.heads.softmaxes(softmax))
        return self.heads.together([part.read_awaited(*given, mask, own) for part, *given, own in inputs])

    def forget_awaited(self) -> None:
        """Has no reader come any more."""
        for part in self._parts:
            part.forget_awaited()

    def reset(self) -> None:
        """Forgets everything."""
        self.pending = None
        for part in self._parts:
            part.reset()
