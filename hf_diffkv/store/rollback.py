"""Recording of tokens that may still be cropped.

While a store records, new tokens are attended to exactly but get neither levels nor scores. When `crop` says how many
were rejected, the rest is stored as one forward, as if the rejected tokens had never been seen. Everything between two
crops counts as one step of the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.softmax import Softmax
from .budget import check_budget
from .decode import StepAttention
from .forks import make_private
from .lowering import give_way
from .prompt import PromptAttention, StoredPast, attend_from_newest
from .recorded import Read, Recorded
from .state import Store
from .step import prepare_step, withdraw
from .transform import NewPrompt, check_finite

# tokens that can be cropped; the earlier tokens of a longer forward are stored at once
ROLLBACK_TOKENS = 256


class RecordedAttention:
    """New tokens that may still be cropped, to which a layer and perhaps later ones attend.

    Args:
        readers: number of layers besides the first one. Other arguments as in `PromptAttention`.

    Raises:
        ValueError: keys or values are not finite; nothing has changed.
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
        self._new = Recorded(key, value, valid, mask, ())

    def attend(self, query: Tensor, softmax: Softmax, last: bool = True) -> Tensor:
        """Returns one layer's attention output, from all tokens or the newest ones; records them after the last.

        Raises:
            MemoryError: the recorded tokens do not fit into `max_bytes`.
        """
        store, layer = self._store, self._layer
        first = not self._new.reads
        self._new = replace(self._new, reads=(*self._new.reads, Read(query, softmax)))
        if first and layer == 0:
            self._reserve(query)
        before = store.recorded[layer]
        together = self._new if before is None else before.followed_by(self._new)
        entering = NewPrompt(store, layer, together.key, together.value, together.valid)
        past = StoredPast.read(store, layer, entering)
        # without readers, the queries of all recorded tokens are here, so that each may see different tokens
        asked = query if self._readers else together.reads[0].query
        output, _ = attend_from_newest(store, layer, past, asked, entering, together.mask, softmax)
        if last:
            _keep(store, layer, together)
        return output[:, :, output.shape[2] - query.shape[2] :]

    def _reserve(self, query: Tensor) -> None:
        """Makes room for the tokens that all layers will record. Raises `MemoryError` if they do not fit."""
        store, kept = self._store, self._kept()
        states = kept.key.nbytes + kept.value.nbytes
        later = store.readers * kept.reads[0].query.numel() * query.element_size()
        more = later + kept.bytes * store.num_layers
        store.lowering.promised = 0
        give_way(store, more, states, kept.bytes - states)
        check_budget(store, more)
        store.lowering.promised = more

    def _kept(self) -> Recorded:
        """Returns as many of the newest tokens as `_keep` adds to the recorded ones."""
        before, new = self._store.recorded[self._layer], self._new.tokens
        known = 0 if before is None else before.tokens
        more = max(0, new - _surplus(known + new))
        return self._new.part(new - more, new)


def _surplus(tokens: int) -> int:
    """Returns how many of the tokens that would be recorded are stored at once."""
    return tokens - ROLLBACK_TOKENS if tokens > 2 * ROLLBACK_TOKENS else 0


def _keep(store: Store, layer: int, together: Recorded) -> None:
    """Replaces the recorded tokens with `together`; stores the surplus at once."""
    surplus = _surplus(together.tokens)
    if surplus:
        _store(store, layer, together.part(0, surplus), generation_step=False)
        together = together.part(surplus, together.tokens)
    before, store.recorded[layer] = store.recorded[layer], together.detached()
    grown = together.bytes - (0 if before is None else before.bytes)
    promised = store.lowering.promised - max(0, grown)
    store.lowering.promised = max(0, promised) if layer < store.num_layers - 1 else 0


def commit_together(stores: Sequence[Store], rejected: int, share_budget: Callable[[Store], None]) -> None:
    """Stores the recorded tokens except for the last `rejected` ones, in every layer of all stores.

    Args:
        share_budget: function that is called with a store before it may grow.

    Raises:
        ValueError: more tokens are rejected than are recorded; nothing has changed.
        MemoryError: the tokens do not fit; nothing has changed in stores that still have `revocable` ones.
    """
    possible = min((store.revocable for store in stores), default=rejected)
    if rejected > possible:
        raise ValueError(
            f"cannot remove {rejected} tokens: only the last {possible} can be rolled back. Call "
            "activate_past_recording() before the forward whose tokens may be rejected (generate() does), or keep a "
            "copy.deepcopy of the cache."
        )
    ready: list[Store] = []
    try:
        for store in stores:
            share_budget(store)
            _prepare(store, rejected)
            ready.append(store)
        for store in stores:
            share_budget(store)
            _commit(store, rejected)
    except MemoryError:
        for store in ready:
            if store.revocable:
                withdraw(store, 0)
        raise


def _prepare(store: Store, rejected: int) -> None:
    """Makes room for the remaining tokens if they are a generation step. Raises as `begin_forward` does."""
    make_private(store)
    store.forward = None
    store.lowering.begin()
    if _generates(store, rejected):
        prepare_step(store)


def _generates(store: Store, rejected: int) -> bool:
    """Returns whether the remaining tokens are a generation step of the algorithm: one token after earlier ones."""
    return store.revocable - rejected == 1 and store.seen - rejected > 1


# attention sinks are parameters of the model
@torch.no_grad()
def _commit(store: Store, rejected: int) -> None:
    """Stores the remaining tokens. Raises `MemoryError` without a change if the first layer's tokens do not fit."""
    generation_step = _generates(store, rejected)
    store.seen -= rejected
    store.padding.length -= rejected
    # no longer counted, so that their budget is available for their pages
    held_by_layer, store.recorded = store.recorded, [None] * store.num_layers
    stored = False
    try:
        for layer, recorded in enumerate(held_by_layer):
            if recorded is not None and recorded.tokens > rejected:
                _store(store, layer, recorded.part(0, recorded.tokens - rejected), generation_step)
                stored = True
    except MemoryError:
        if not stored:
            store.seen += rejected
            store.padding.length += rejected
            store.recorded = held_by_layer
        raise


def _store(store: Store, layer: int, recorded: Recorded, generation_step: bool) -> None:
    if generation_step:
        valid = None if recorded.valid is None else recorded.valid[:, 0]
        shared = StepAttention(store, layer, recorded.key, recorded.value, valid)
        # separately even for one layer: its rounding decides what saved caches hold
        shared.append()
    else:
        shared = PromptAttention(store, layer, recorded.key, recorded.value, recorded.valid, recorded.mask)
    # a reader may have queries only for rejected tokens
    reads = [read for read in recorded.reads if read.query.shape[2]]
    for read in reads:
        shared.attend(read.query, read.softmax, read is reads[-1])
