"""Requests that come and go: each has a slot, the same in every store, and an idle slot holds no page and does no work.

Tables and scratch are made once, for the longest request that is allowed, so that everything stays where it is. A
forward may hold any requests in any order, one token of some and many of others; what becomes of each does not depend
on the others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..config import DiffKVConfig
from ..ops.softmax import Softmax
from ..pages.layout import NARROW_POSITIONS
from ..store.compaction import settle
from ..store.decode import attend_token
from ..store.prompt import attend_tokens
from ..store.state import Store
from .shapes import AttentionShape
from .slot_part import make_parts
from .staging import stage


class Slots:
    """Slots under a byte budget.

    Every forward goes: `settle`, `reserve` for each request in it, `begin`, `attend` layer by layer.

    Args:
        config: the user's choices; `max_bytes` is not looked at.
        shape: of every layer.
        num_layers: compressed layers of the model.
        count: requests that may be there at once.
        max_tokens: tokens of the longest request that is allowed.
        max_bytes: of everything that is held: windows, tables, scratch, pages.
        left_bytes: of `max_bytes`, what others hold.

    Attributes:
        parts: the layers of each store. Pages of one cannot be had in another: what is said of pages is said for each
            part, as int64 [parts].
        longest: tokens of the longest request that surely fits while it is alone; at most `max_tokens`.
        failures: what went wrong in the running forward, by slot.

    Raises:
        ValueError: thresholds or precisions for another number of layers or heads, or `compaction_interval` above 1.
        MemoryError: `max_bytes` cannot hold the slots and one short request.
    """

    def __init__(
        self,
        config: DiffKVConfig,
        shape: AttentionShape,
        num_layers: int,
        count: int,
        *,
        max_tokens: int,
        max_bytes: int,
        left_bytes: int = 0,
    ) -> None:
        if config.compaction_interval != 1:
            raise ValueError(
                f"compaction_interval={config.compaction_interval} counts the steps of a whole batch, whose requests "
                "come and go here; use compaction_interval=1."
            )
        self.max_bytes, self.count = max_bytes, count
        self.device, self.dtype = shape.device, shape.dtype
        self.parts = make_parts(config, shape, num_layers, count, max_tokens)
        self._exact = config.sinks + config.window
        self._places = {index: (part, layer) for part in self.parts for layer, index in enumerate(part.store.layers)}
        self.longest = self._share_out(max_bytes - left_bytes, max_tokens)
        if self.longest < min(max_tokens, self._exact):
            raise MemoryError(
                f"max_bytes={max_bytes} holds no page beside the windows and tables of {count} requests of up to "
                f"{max_tokens} tokens; raise max_bytes, or allow fewer or shorter requests."
            )
        self._idle = list(range(count))
        self._seen = [0] * count
        self._forward: list[tuple[int, int, int]] = []
        self.failures: dict[int, Exception] = {}
        for part in self.parts:
            part.look()

    def _share_out(self, max_bytes: int, max_tokens: int) -> int:
        """Gives each part its pages, in the proportion in which a long request takes them; returns `longest`."""
        beside = sum(part.store.bytes_beside_pages(max_tokens) for part in self.parts)
        costs = [part.store.bytes_per_page for part in self.parts]
        weights = [max(1, part.pages_for(max_tokens)) * cost for part, cost in zip(self.parts, costs)]
        narrow = any(part.store.layout.high.position_bytes == 2 for part in self.parts)
        longest = min(max_tokens, NARROW_POSITIONS) if narrow else max_tokens
        for part, cost, weight in zip(self.parts, costs, weights):
            pages = (max_bytes - beside) * weight // (sum(weights) * cost)
            part.set_limit(pages)
            # all but the null page
            longest = min(longest, bisect_right(range(max_tokens + 1), pages - 1, key=part.pages_for) - 1)
        return longest

    @property
    def bytes(self) -> int:
        """Bytes the device holds for all slots."""
        return sum(part.store.bytes for part in self.parts)

    @property
    def bytes_beside_pool(self) -> int:
        """Of `bytes`, what is not for pages."""
        return self.bytes - sum(part.store.pool.bytes for part in self.parts)

    @property
    def max_pages(self) -> np.ndarray:
        """Pages that requests may hold, by part."""
        return np.array([part.store.pool.max_pages - 1 for part in self.parts])

    @property
    def used_pages(self) -> np.ndarray:
        """Pages that requests hold, by part."""
        pools = [part.store.pool for part in self.parts]
        return np.array([pool.capacity - 1 - pool.free_list.free for pool in pools])

    @property
    def unreserved(self) -> np.ndarray:
        """Pages that may still be reserved, by part."""
        return np.array([part.reservations.unreserved for part in self.parts])

    @property
    def idle(self) -> int:
        """How many slots no request has."""
        return len(self._idle)

    def seen(self, slot: int) -> int:
        """Tokens of the request in `slot` so far."""
        return self._seen[slot]

    def adopt(self) -> int:
        """Gives an idle slot to a request that has no tokens yet. Raises `MemoryError` where all are taken."""
        if not self._idle:
            raise MemoryError(f"all {self.count} slots are taken.")
        return heapq.heappop(self._idle)

    def release(self, slot: int) -> None:
        """Gives back all that the request in `slot` holds, pages and reservations, and the slot itself."""
        for part in self.parts:
            if self._seen[slot]:
                part.clear(slot)
            part.withdraw(slot)
        self._seen[slot] = 0
        heapq.heappush(self._idle, slot)

    def load(self, slot: int, sources: Iterable[Store]) -> None:
        """Copies the one request that `sources` hold into `slot`, which is adopted and has no tokens yet.

        Args:
            sources: of the same configuration and shape, settled, without padding; each has the layers of a part. Its
                pages must be left unreserved.

        Raises:
            MemoryError: the device has no memory; nothing has changed then.
        """
        by_layers = {tuple(source.layers): source for source in sources}
        loaded = [(part, by_layers[tuple(part.store.layers)]) for part in self.parts]
        for part, source in loaded:
            part.provide(source.owned_pages().numel())
        for part, source in loaded:
            part.load(slot, source)
            self._seen[slot] = source.seen

    def held(self, slot: int) -> list[Store]:
        """What the request in `slot` holds, a store for each part, with the slot's memory; valid until it changes."""
        for part in self.parts:
            settle(part.store)
        return [stage(part.store, slot, self._seen[slot], part.store.pool) for part in self.parts]

    def fork(self, slot: int) -> int | None:
        """A further slot with a copy of the request in `slot`; None where there is no room. Only after `settle`.

        Raises:
            MemoryError: the device has no memory; nothing has changed then.
        """
        if not self._idle or any(part.held(slot) > part.reservations.unreserved for part in self.parts):
            return None
        for part in self.parts:
            part.provide(part.held(slot))
        twin = self.adopt()
        for part in self.parts:
            part.copy(slot, twin)
        self._seen[twin] = self._seen[slot]
        return twin

    def settle(self) -> None:
        """Ends the last forward: runs the compaction behind it and takes back every reservation."""
        self._forward.clear()
        for part in self.parts:
            part.settle()

    def need(self, slot: int | None, tokens: int) -> np.ndarray:
        """Pages that `tokens` more tokens take at most, by part. Only after `settle`.

        Args:
            slot: None for a request that has none yet.
        """
        seen = 0 if slot is None else self._seen[slot]
        return np.array([part.need(slot, seen, tokens) for part in self.parts])

    def fits(self, slot: int | None, tokens: int) -> bool:
        """Whether what `tokens` more tokens need may still be reserved. As `need`."""
        return bool((self.need(slot, tokens) <= self.unreserved).all())

    def reserve(self, slot: int, tokens: int) -> bool:
        """Reserves what `tokens` more tokens need, compaction included; False if there is too little. As `need`."""
        need = self.need(slot, tokens)
        promised = np.array([part.reservations.promised(slot) for part in self.parts])
        if (need - promised > self.unreserved).any():
            return False
        return all(part.reservations.reserve(slot, int(pages)) for part, pages in zip(self.parts, need))

    def begin(self, forward: Sequence[tuple[int, int]]) -> None:
        """Starts a forward for which everything is reserved.

        Args:
            forward: slot and number of its new tokens, in the order in which they are packed; each slot once.

        Raises:
            MemoryError: the device has no memory for what was reserved.
        """
        for part in self.parts:
            part.reservations.provide()
        self.failures = {}
        steps, prompts, at = [], [], 0
        for slot, tokens in forward:
            seen = self._seen[slot]
            if tokens == 1 and seen:
                steps.append((slot, at))
            elif tokens:
                self._forward.append((slot, at, tokens))
                prompts.append((slot, seen, tokens))
            self._seen[slot] += tokens
            at += tokens
        pairs = torch.tensor(steps, dtype=torch.int64, device=self.device).view(-1, 2)
        self._step_slots, self._step_at = pairs.unbind(1)
        self._stepping = torch.zeros(self.count, dtype=torch.bool, device=self.device)
        self._stepping[self._step_slots] = True
        leaves = any(self._seen[slot] == self._exact + 1 for slot, _ in steps)
        for part in self.parts:
            part.begin(prompts, bool(steps), leaves)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attends from the packed tokens of a forward and stores them.

        A request that fails is noted in `failures`, and its output is zero from there on.

        Args:
            layer: index of the layer.
            query: [1, query_heads, tokens, key_dim]; key, value: [1, heads, tokens, dim].

        Returns:
            [1, query_heads, tokens, value_dim] in the query's dtype.
        """
        part, place = self._places[layer]
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        if self._step_slots.numel():
            given = []
            for tensor in (query, key, value):
                rows = tensor.new_zeros(self.count, tensor.shape[1], 1, tensor.shape[3])
                rows[self._step_slots, :, 0] = tensor[0, :, self._step_at].transpose(0, 1)
                given.append(rows)
            stepped = attend_token(part.store, place, *given, softmax, self._stepping)
            output[0, :, self._step_at] = stepped[self._step_slots, :, 0].transpose(0, 1)
        for slot, at, tokens in self._forward:
            if slot in self.failures:
                continue
            mine = slice(at, at + tokens)
            inputs = (tensor[:, :, mine] for tensor in (query, key, value))
            try:
                output[:, :, mine] = attend_tokens(part.staged[slot], place, *inputs, softmax)
            except (ValueError, MemoryError) as error:
                self.failures[slot] = error
        return output

    def take_failures(self) -> dict[int, Exception]:
        """What went wrong in the forward that has just run, by slot; those requests can only be released."""
        for store in [part.store for part in self.parts if self._step_slots.numel()]:
            spoiled = store.spoiled(self._step_slots)
            self.failures.update({slot: ValueError(store.value_message()) for slot in spoiled})
        failures, self.failures = self.failures, {}
        return failures
