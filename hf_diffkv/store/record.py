"""Tokens that may still be taken back.

While a store records, new tokens are attended exactly but neither levelled nor scored. When `crop` says how many were
rejected, the rest is stored as one forward, so the result is as if the rejected tokens had never been seen. Everything
between two crops counts as one step of the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .finite import check_finite
from .fork import make_private
from .prompt import Past, attend_beside
from .shared import SharedStep, SharedTokens, attend_from_newest
from .state import Store
from .transform import Entering

# Tokens that can be taken back; what a longer forward holds before them is stored at once.
ROLLBACK_TOKENS = 256


@dataclass(frozen=True)
class Read:
    """Queries of a later layer of the model that reads a layer's tokens as well, of the newest n of them.

    Attributes:
        query: [batch, query_heads, n, key_dim].
        options: as in `Recorded`.
    """

    query: Tensor
    options: dict

    def part(self, tokens: int, start: int, stop: int) -> Read:
        """Those of the tokens [start, stop) of `tokens`."""
        first = tokens - self.query.shape[2]
        return replace(self, query=self.query[:, :, max(start - first, 0) : max(stop - first, 0)])

    def followed_by(self, other: Read, tokens: int) -> Read:
        """Both together, where `other` comes with `tokens` more; only queries without a gap up to the newest count."""
        if other.query.shape[2] < tokens:
            return other
        return replace(other, query=torch.cat([self.query, other.query], dim=2))


@dataclass(frozen=True)
class Recorded:
    """A layer's tokens that are not stored yet, as the model has them.

    Attributes:
        query: [batch, query_heads, tokens, key_dim]; key, value: [batch, heads, tokens, dim].
        valid: bool [batch, tokens] or None. mask: bool [batch, 1, tokens, tokens] or None.
        options: scaling, softcap and sinks of the attention.
        reads: of the later layers that read these keys and values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    mask: Tensor | None
    options: dict = field(default_factory=dict)
    reads: tuple[Read, ...] = ()

    @property
    def tokens(self) -> int:
        return self.key.shape[2]

    def part(self, start: int, stop: int) -> Recorded:
        """The tokens [start, stop)."""
        return replace(
            self,
            query=self.query[:, :, start:stop],
            key=self.key[:, :, start:stop],
            value=self.value[:, :, start:stop],
            valid=None if self.valid is None else self.valid[:, start:stop],
            mask=None if self.mask is None else self.mask[:, :, start:stop, start:stop],
            reads=tuple(read.part(self.tokens, start, stop) for read in self.reads),
        )

    def followed_by(self, other: Recorded) -> Recorded:
        """Both together; `other` attends all of `self`."""
        return Recorded(
            torch.cat([self.query, other.query], dim=2),
            torch.cat([self.key, other.key], dim=2),
            torch.cat([self.value, other.value], dim=2),
            self._joined_valid(other),
            self._joined_mask(other),
            other.options,
            tuple(mine.followed_by(theirs, other.tokens) for mine, theirs in zip(self.reads, other.reads)),
        )

    def _joined_valid(self, other: Recorded) -> Tensor | None:
        if self.valid is None and other.valid is None:
            return None
        ones = [torch.ones(r.key.shape[0], r.tokens, dtype=torch.bool, device=r.key.device) for r in (self, other)]
        return torch.cat([one if r.valid is None else r.valid for r, one in zip((self, other), ones)], dim=1)

    def _joined_mask(self, other: Recorded) -> Tensor | None:
        if self.mask is None and other.mask is None:
            return None
        first, total = self.tokens, self.tokens + other.tokens
        mask = torch.ones(self.key.shape[0], 1, total, total, dtype=torch.bool, device=self.key.device).tril()
        if self.mask is not None:
            mask[:, :, :first, :first] = self.mask
        if other.mask is not None:
            mask[:, :, first:, first:] = other.mask
        return mask

    def entering(self, store: Store, layer: int) -> Entering:
        """The tokens on their way into a layer of `store`."""
        return Entering(store, layer, self.key, self.value, self.valid)

    def detached(self) -> Recorded:
        """A copy that keeps no larger tensor alive."""
        reads = tuple(replace(read, query=read.query.clone()) for read in self.reads)
        return replace(self, query=self.query.clone(), key=self.key.clone(), value=self.value.clone(), reads=reads)

    def select(self, index: Tensor) -> Recorded:
        """The requests `index`, int64 [n]."""
        return replace(
            self,
            query=self.query[index],
            key=self.key[index],
            value=self.value[index],
            valid=None if self.valid is None else self.valid[index],
            mask=None if self.mask is None else self.mask.expand(self.key.shape[0], -1, -1, -1)[index],
            reads=tuple(replace(read, query=read.query[index]) for read in self.reads),
        )

    def count(self) -> Tensor:
        """Real tokens of each request, int64 [batch]."""
        if self.valid is None:
            return torch.full((self.key.shape[0],), self.tokens, device=self.key.device)
        return self.valid.sum(-1)

    @property
    def bytes(self) -> int:
        """Bytes held until the next `commit`."""
        tensors = [t for t in (self.query, self.key, self.value, self.valid, self.mask) if t is not None]
        return sum(t.numel() * t.element_size() for t in [*tensors, *(read.query for read in self.reads)])


def attend_recorded(store: Store, layer: int, new: Recorded) -> Tensor:
    """Attends from new tokens over what is stored, what is recorded, and themselves; records them.

    Returns:
        [batch, query_heads, tokens, value_dim] in the query's dtype.

    Raises:
        ValueError: keys or values that are not finite; nothing has changed then.
    """
    check_finite(store, new.key, new.value, new.valid)
    if layer == 0:
        store.check_budget(new.bytes * store.num_layers)
    before = store.recorded[layer]
    together = new if before is None else before.followed_by(new)
    entering = together.entering(store, layer)
    past = Past.read(store, layer, entering)
    key, value = entering.beside(past)
    options = {"valid": together.valid, "mask": together.mask, **new.options}
    output, _ = attend_beside(store, layer, past, together.query, key, value, **options)
    _keep(store, layer, together)
    return output[:, :, output.shape[2] - new.tokens :]


class SharedRecording:
    """Tokens that may be taken back, attended by several layers. Arguments and errors as in `attend_recorded`.

    Args:
        readers: layers beside the first one.
    """

    def __init__(
        self,
        store: Store,
        layer: int,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        mask: Tensor | None,
        readers: int,
    ) -> None:
        check_finite(store, key, value, valid)
        self._store, self._layer, self._readers = store, layer, readers
        self._new: Recorded | None = None
        self._tokens = (key, value, valid, mask)

    def attend(self, query: Tensor, last: bool, **options: Any) -> Tensor:
        """One layer's attention, from the newest tokens or all; the last one records them."""
        store, layer = self._store, self._layer
        if self._new is None:
            self._new = Recorded(query, *self._tokens, options)
            later = self._readers * query.numel() * query.element_size()
            store.check_budget(later + self._new.bytes * (store.num_layers if layer == 0 else 0))
        else:
            self._new = replace(self._new, reads=(*self._new.reads, Read(query, options)))
        before = store.recorded[layer]
        together = self._new if before is None else before.followed_by(self._new)
        entering = together.entering(store, layer)
        past = Past.read(store, layer, entering)
        output, _ = attend_from_newest(store, layer, past, query, entering, together.mask, **options)
        if last:
            _keep(store, layer, together)
        return output


def _keep(store: Store, layer: int, together: Recorded) -> None:
    """Records `together` in place of what was recorded; stores at once what is too much of it."""
    if together.tokens > 2 * ROLLBACK_TOKENS:
        surplus = together.tokens - ROLLBACK_TOKENS
        _store(store, layer, together.part(0, surplus), generation_step=False)
        together = together.part(surplus, together.tokens)
    store.recorded[layer] = together.detached()


def commit(store: Store, rejected: int) -> None:
    """Stores what is recorded but for the last `rejected` tokens, in every layer.

    Raises:
        ValueError: more tokens rejected than can be taken back; nothing has changed then.
    """
    held = [recorded.tokens for recorded in store.recorded if recorded is not None]
    possible = min(held, default=0)
    if rejected > possible:
        raise ValueError(
            f"cannot remove {rejected} tokens: only the last {possible} can be taken back. Call "
            "activate_past_recording() before the forward whose tokens may be rejected (generate() does), or keep a "
            "copy.deepcopy of the cache."
        )
    make_private(store)
    store.forward = None
    store.seen -= rejected
    store.padding.length -= rejected
    kept = max(held, default=0) - rejected
    # one token over a past is a generation step of the algorithm
    generation_step = kept == 1 and store.seen > 1
    if generation_step:
        store.prepare_step()
    for layer, recorded in enumerate(store.recorded):
        store.recorded[layer] = None
        if recorded is not None and recorded.tokens > rejected:
            _store(store, layer, recorded.part(0, recorded.tokens - rejected), generation_step)


def _store(store: Store, layer: int, recorded: Recorded, generation_step: bool) -> None:
    if generation_step:
        valid = None if recorded.valid is None else recorded.valid[:, 0]
        shared = SharedStep(store, layer, recorded.key, recorded.value, valid)
    else:
        shared = SharedTokens(store, layer, recorded.key, recorded.value, recorded.valid, recorded.mask)
    # a reader may have had queries of rejected tokens only
    reads = [read for read in recorded.reads if read.query.shape[2]]
    shared.attend(recorded.query, last=not reads, **recorded.options)
    for read in reads:
        shared.attend(read.query, last=read is reads[-1], **read.options)
