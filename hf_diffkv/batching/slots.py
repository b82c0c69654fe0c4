"""Requests that come and go on one store: each has a slot, and an idle slot holds no page and does no work.

Tables and scratch are made once, for the longest request that is allowed, so that everything stays where it is. A
forward may hold any requests in any order, one token of some and many of others; what becomes of each does not depend
on the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..config import DiffKVConfig
from ..ops.softmax import Softmax
from ..pages import NULL_PAGE
from ..pages.rows import ROW_STATE
from ..store.compaction import settle
from ..store.copies import copy_pages
from ..store.decode import attend_token, prepare_scratch
from ..store.prompt import attend_tokens
from ..store.state import Store
from ..store.step import begin_forward
from .reservations import Reservations, ReservedPool
from .slot_store import SlotStore
from .staging import stage


class Slots:
    """Slots of one store under a byte budget.

    Every forward goes: `settle`, `reserve` for each request in it, `begin`, `attend` layer by layer.

    Args:
        config: the user's choices; `max_bytes` is not looked at.
        num_layers: compressed layers of the model.
        slots: requests that may be there at once.
        num_heads, query_heads: KV heads and query heads of a layer.
        key_dim, value_dim: elements of one head.
        dtype, device: of the model's keys and values.
        max_tokens: tokens of the longest request that is allowed.
        max_bytes: of everything that is held: windows, tables, scratch, pages.
        left_bytes: of `max_bytes`, what others hold.

    Attributes:
        store: holds all slots.
        longest: tokens of the longest request that surely fits while it is alone; at most `max_tokens`.
        failures: what went wrong in the running forward, by slot.

    Raises:
        ValueError: thresholds for another number of layers or heads, or `compaction_interval` above 1.
        MemoryError: `max_bytes` cannot hold the slots and one short request.
    """

    def __init__(
        self,
        config: DiffKVConfig,
        num_layers: int,
        slots: int,
        num_heads: int,
        query_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
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
        self.max_bytes = max_bytes
        shape = (num_layers, slots, num_heads, key_dim, value_dim, dtype, device)
        self.store = store = SlotStore(replace(config, max_bytes=None), *shape)
        store.set_all_thresholds(config.alpha_high, config.alpha_low)
        # what a slot has without a request, where it is not zero
        names = ("alpha_high", "alpha_low", "sink_end", "window_start")
        self._empty = {name: getattr(store, name)[:, 0].clone() for name in names}
        # what a slot gets one by one are generated tokens
        store.seen = 1
        store.room = max_tokens
        store.ensure_width(max_tokens + store.window_slots)
        prepare_scratch(store, torch.zeros(slots, query_heads, key_dim, dtype=dtype, device=device))
        pages = store.pages_within(max_bytes - left_bytes, max_tokens)
        self.longest = min(max_tokens, self._tokens_within(pages - 1))
        if self.longest < min(max_tokens, self._exact):
            raise MemoryError(
                f"max_bytes={max_bytes} holds no page beside the windows and tables of {slots} requests of up to "
                f"{max_tokens} tokens; raise max_bytes, or allow fewer or shorter requests."
            )
        store.pool.max_pages = pages
        self.reservations = Reservations(store.pool)
        self._idle = list(range(slots))
        self._seen = [0] * slots
        self._forward: list[tuple[int, int, int]] = []
        self._staged: dict[int, Store] = {}
        self.failures: dict[int, Exception] = {}
        self._look()

    @property
    def bytes(self) -> int:
        """Bytes the device holds for all slots."""
        return self.store.bytes

    @property
    def idle(self) -> int:
        """How many slots no request has."""
        return len(self._idle)

    def seen(self, slot: int) -> int:
        """Tokens of the request in `slot` so far."""
        return self._seen[slot]

    def pages_for(self, tokens: int) -> int:
        """Pages that a request of `tokens` tokens takes at most."""
        rows = self.store.num_layers * self.store.num_heads
        return rows * self._row_pages(tokens)

    def _row_pages(self, tokens: int) -> int:
        stored = tokens - self._exact
        # both tiers may end in a page that is not full
        return -(-stored // self._page_tokens()) + 1 if stored > 0 else 0

    @property
    def _exact(self) -> int:
        """Tokens that a request has before the first one leaves its window."""
        return self.store.config.sinks + self.store.config.window

    def _page_tokens(self) -> int:
        return min(self.store.layout.high.capacity, self.store.layout.low.capacity)

    def _tokens_within(self, pages: int) -> int:
        """Tokens of the longest request that takes at most `pages` pages."""
        per_row = pages // (self.store.num_layers * self.store.num_heads)
        return max(0, per_row - 1) * self._page_tokens() + self._exact if per_row >= 0 else -1

    def adopt(self) -> int:
        """Gives an idle slot to a request that has no tokens yet. Raises `MemoryError` where all are taken."""
        if not self._idle:
            raise MemoryError(f"all {self.store.batch_size} slots are taken.")
        return heapq.heappop(self._idle)

    def release(self, slot: int) -> None:
        """Gives back all that the request in `slot` holds, pages and reservations, and the slot itself."""
        if self._seen[slot]:
            store = self.store
            table = store.table.table[:, slot]
            store.pool.free_list.give(table[table != NULL_PAGE])
            table.zero_()
            for name in ROW_STATE:
                getattr(store, name)[:, slot] = self._empty.get(name, 0)
            self._seen[slot] = 0
            self._held[:, slot] = 0
        self._staged.pop(slot, None)
        self.reservations.withdraw(slot)
        self.reservations.look_again()
        heapq.heappush(self._idle, slot)

    def load(self, slot: int, source: Store) -> None:
        """Copies the one request that `source` holds into `slot`, which is adopted and has no tokens yet.

        Args:
            source: of the same configuration and shape, settled, without padding. Its pages must be left unreserved.
        """
        store, table = self.store, source.table.table
        used = table != NULL_PAGE
        pages = source.pool.pages[table[used].long()]
        store.pool.ensure_free(pages.shape[0])
        _, fresh = store.pool.free_list.take(torch.tensor([pages.shape[0]], device=store.device))
        store.pool.pages[fresh] = pages
        fresh_table = torch.zeros_like(table)
        fresh_table[used] = fresh.to(table.dtype)
        # high pages stand on the left, low ones on the right
        mine, high = store.table.table[:, slot], -(-source.high_count[:, 0] // store.layout.high.capacity)
        width = min(mine.shape[-1], table.shape[-1])
        left = torch.arange(width, device=store.device) < high[..., None]
        mine[..., :width] = fresh_table[:, 0, :, :width] * left
        left = torch.arange(table.shape[-1], device=store.device)[-width:] < high[..., None]
        mine[..., -width:] += fresh_table[:, 0, :, -width:] * ~left
        for name in ROW_STATE:
            getattr(store, name)[:, slot] = getattr(source, name)[:, 0]
        self._seen[slot] = source.seen
        self._look()

    def fork(self, slot: int) -> int | None:
        """A further slot with a copy of the request in `slot`; None where there is no room. Only after `settle`."""
        store, pages = self.store, int(self._held[:, slot].sum())
        if not self._idle or pages > self.reservations.unreserved:
            return None
        twin = self.adopt()
        store.pool.ensure_free(pages)
        _, fresh = store.pool.free_list.take(torch.tensor([pages], device=store.device))
        table = store.table.table[:, slot].clone()
        copy_pages(store, table[table != NULL_PAGE].long(), fresh)
        table[table != NULL_PAGE] = fresh.to(table.dtype)
        store.table.table[:, twin] = table
        for name in ROW_STATE:
            state = getattr(store, name)
            state[:, twin] = state[:, slot]
        self._seen[twin] = self._seen[slot]
        self._look()
        return twin

    def settle(self) -> None:
        """Ends the last forward: runs the compaction behind it and takes back every reservation."""
        settle(self.store)
        self.reservations.clear()
        self._staged.clear()
        self._forward.clear()
        self._look()

    def _look(self) -> None:
        self._full, self._held = self.store.look()
        self.reservations.look_again()

    def need(self, slot: int | None, tokens: int) -> int:
        """Pages that `tokens` more tokens take at most. Only after `settle`.

        Args:
            slot: None for a request that has none yet.
        """
        if slot is None:
            return self.pages_for(tokens)
        seen = self._seen[slot]
        if seen and tokens == 1:
            return int(self._full[:, slot].sum()) if seen >= self._exact else 0
        return int(np.maximum(0, self._row_pages(seen + tokens) - self._held[:, slot]).sum())

    def reserve(self, slot: int, tokens: int) -> bool:
        """Reserves what `tokens` more tokens need, compaction included; False if there is too little. As `need`."""
        return self.reservations.reserve(slot, self.need(slot, tokens))

    def begin(self, forward: Sequence[tuple[int, int]]) -> None:
        """Starts a forward for which everything is reserved.

        Args:
            forward: slot and number of its new tokens, in the order in which they are packed; each slot once.

        Raises:
            MemoryError: the device has no memory for what was reserved.
        """
        self.reservations.provide()
        self.failures = {}
        steps, at = [], 0
        for slot, tokens in forward:
            seen = self._seen[slot]
            if tokens == 1 and seen:
                steps.append((slot, at))
            elif tokens:
                self._forward.append((slot, at, tokens))
                self._staged[slot] = stage(self.store, slot, seen, ReservedPool(self.reservations, slot))
                self._staged[slot].seen += tokens
            self._seen[slot] += tokens
            at += tokens
        device = self.store.device
        self._step_slots, self._step_at = torch.tensor(steps, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        self._stepping = torch.zeros(self.store.batch_size, dtype=torch.bool, device=device)
        self._stepping[self._step_slots] = True
        if steps:
            leaves = any(self._seen[slot] == self._exact + 1 for slot, _ in steps)
            self.store.centers_soon = self.store.config.center and leaves
            begin_forward(self.store, 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attends from the packed tokens of a forward and stores them.

        A request that fails is noted in `failures`, and its output is zero from there on.

        Args:
            layer: index of the layer.
            query: [1, query_heads, tokens, key_dim]; key, value: [1, heads, tokens, dim].

        Returns:
            [1, query_heads, tokens, value_dim] in the query's dtype.
        """
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        if self._step_slots.numel():
            given = []
            for tensor in (query, key, value):
                rows = tensor.new_zeros(self.store.batch_size, tensor.shape[1], 1, tensor.shape[3])
                rows[self._step_slots, :, 0] = tensor[0, :, self._step_at].transpose(0, 1)
                given.append(rows)
            stepped = attend_token(self.store, layer, *given, softmax, self._stepping)
            output[0, :, self._step_at] = stepped[self._step_slots, :, 0].transpose(0, 1)
        for slot, at, tokens in self._forward:
            if slot in self.failures:
                continue
            part = slice(at, at + tokens)
            inputs = (tensor[:, :, part] for tensor in (query, key, value))
            try:
                output[:, :, part] = attend_tokens(self._staged[slot], layer, *inputs, softmax)
            except (ValueError, MemoryError) as error:
                self.failures[slot] = error
        return output

    def take_failures(self) -> dict[int, Exception]:
        """What went wrong in the forward that has just run, by slot; those requests can only be released."""
        spoiled = self.store.spoiled(self._step_slots) if self._step_slots.numel() else []
        self.failures.update({slot: ValueError(self.store.value_message()) for slot in spoiled})
        failures, self.failures = self.failures, {}
        return failures
