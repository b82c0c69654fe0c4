"""Slots for requests that come and go, the same in every store. An idle slot holds no page and does no work.

The number and length of slots follow the need (slot_room.py). A forward may hold any requests in any order, one token
of some and many of others. Unless rows are lowered (`until_full`), the result of each does not depend on the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.heads.harm import HarmBetween
from hf_diffkv.heads.query_moments import QueryMoments
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages.reserve import NO_MEMORY
from hf_diffkv.store.compaction import settle
from hf_diffkv.store.decode import StepAttention
from hf_diffkv.store.faults import unstorable
from hf_diffkv.store.prompt import PromptAttention
from hf_diffkv.store.state import Store

from .part_rungs import PlannedRequests
from .ranks import OtherPart, other_parts
from .rungs import RungCounts, RungsOfParts
from .shapes import AttentionShape
from .slot_part import SlotPart, make_parts, slot_configs
from .slot_room import FIRST_TOKENS, PerSlot, SlotRoom
from .staging import stage
from .until_full import lowers

_logger = logging.getLogger("hf_diffkv")


class Slots:
    """Slots under a byte budget.

    Calls for each forward, in order: `settle`; `make_room` and `reserve` per request; `begin`; `attend` per layer.

    Args:
        config: user's configuration; its `max_bytes` is ignored. If it names `until_full`, rows are lowered before a
            request finds no room (`rungs.py`).
        shape: shape of every layer.
        num_layers: number of compressed layers of the model.
        count: maximum number of concurrent requests.
        max_tokens: tokens of the longest allowed request.
        max_bytes: budget for everything that is held: windows, tables, scratch memory, pages.
        others: other objects that hold memory for every slot.
        harm: predicted loss from lowering heads; None if unknown.

    Attributes:
        room: number of slots and their length.
        parts: layers of each store. A store cannot use pages of another one, so numbers of pages are int64 [parts],
            including the parts of other ranks.
        failures: errors in the running forward, by slot.
        rungs: rungs of the requests; None if no rows are lowered.

    Raises:
        ValueError: thresholds or precisions for another number of layers or heads, or `until_full` if several ranks
            share the heads.
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
        others: Sequence[PerSlot] = (),
        harm: HarmBetween | None = None,
    ) -> None:
        self.max_bytes, self.ranks, self._others = max_bytes, shape.ranks, others
        self.device, self.dtype = shape.device, shape.dtype
        if lowers(config) and not self.ranks.alone:
            raise ValueError(
                "until_full cannot be combined with tensor parallelism in continuous batching, where ranks count each "
                "other's pages; leave until_full out, or run the model on one device."
            )
        with self.ranks.in_step():
            self.parts = make_parts(slot_configs(config, num_layers, shape), shape)
        self.rungs = RungsOfParts(self.parts, harm) if lowers(config) else None
        self._exact = config.sinks + config.window
        self._places = {index: (part, layer) for part in self.parts for layer, index in enumerate(part.store.layers)}
        self.room = SlotRoom(self.parts, others, count, max_tokens, max_bytes)
        self.room.longest = self.ranks.least(self.room.longest)
        if self.longest < min(max_tokens, self._exact):
            raise MemoryError(
                f"max_bytes={max_bytes} leaves no page besides the window and table of one request of up to "
                f"{max_tokens} tokens; raise max_bytes, or allow shorter requests."
            )
        self._taken: set[int] = set()
        self._seen = [0]
        # tokens of each request in the coming forward
        self._reserved: dict[int, int] = {}
        # slots, tokens and pages that there was no room for since the last forward
        self._denied: list[np.ndarray] = []
        self._moves: list[tuple[int, int]] = []
        self._forward: list[tuple[int, int, int]] = []
        self.failures: dict[int, Exception] = {}
        self._elsewhere = other_parts(self.ranks, [part.bounds for part in self.parts])
        # where a request must find room: the parts here, and those of other ranks
        self.all_parts: list[SlotPart | OtherPart] = [*self.parts, *(part for each in self._elsewhere for part in each)]
        with self.ranks.in_step():
            for part in self.parts:
                part.look()
            self.room.change(1, min(FIRST_TOKENS, self.longest))
        self._tell()

    def use_moments(self, moments: QueryMoments) -> None:
        """Rounds generated keys by moments of the model's queries.

        Raises:
            ValueError: the moments belong to another model.
        """
        moments.check_layers(len(self._places))
        for index, (part, _) in self._places.items():
            moments.check_layer(index, self.ranks.parallel.size * part.store.num_heads, part.store.key_dim)
        for part in self.parts:
            # in place of those that are gathered from prompts
            part.store.moments, part.store.lowering.moments = moments, None

    @property
    def bytes(self) -> int:
        """Bytes the device holds for all slots."""
        return sum(part.store.bytes for part in self.parts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that is sure to fit when alone; at most `max_tokens`."""
        return self.room.longest

    @property
    def count(self) -> int:
        """Number of slots, including idle ones."""
        return self.room.slots

    @property
    def max_pages(self) -> np.ndarray:
        """Pages that requests may hold, by part."""
        return np.array([part.max_pages for part in self.all_parts])

    @property
    def used_pages(self) -> np.ndarray:
        """Pages that requests hold, by part here."""
        return np.array([part.used for part in self.parts])

    @property
    def unreserved(self) -> np.ndarray:
        """Pages that may still be reserved, by part."""
        return np.array([part.unreserved for part in self.all_parts])

    @property
    def idle(self) -> int:
        """Number of slots without a request."""
        return self.count - len(self._taken)

    @property
    def has_place(self) -> bool:
        """Whether a request without any tokens could be admitted."""
        return self._size_for(None, 0) is not None

    def seen(self, slot: int) -> int:
        """Returns the number of tokens of the request in `slot` so far."""
        return self._seen[slot]

    def make_room(self, slot: int | None, tokens: int, shared: int = 0) -> bool:
        """Makes room in the pool and in a slot for `tokens` more tokens of a request. Only after `settle`.

        The number of slots and the width of their tables change with the pages left or needed. Requests may be moved
        to another slot (`take_moves`).

        Args:
            slot: slot of the request; None if it has none yet.
            shared: number of these tokens that another request begins with too; `load` shares their full pages.

        Returns:
            Whether there is room. If not, nothing has changed.

        Raises:
            MemoryError: the device of one of several ranks has no memory.
        """
        size = self._size_for(slot, tokens, shared)
        if size is None and self._lower_for(slot, tokens, shared):
            size = self._size_for(slot, tokens, shared)
        if size is None or size == (self.count, self.room.tokens):
            return size is not None
        for old in sorted(self._taken - set(range(size[0]))):
            self._move(old, min(set(range(size[0])) - self._taken))
        try:
            with self.ranks.in_step():
                self.room.change(*size)
        except NO_MEMORY as error:
            if not self.ranks.alone:
                raise
            _logger.warning("slots cannot become %s for %s tokens: %s", *size, error)
            return False
        finally:
            self._seen = (self._seen + [0] * self.count)[: self.count]
        self._tell()
        return True

    def _tell(self) -> None:
        """Tells other ranks what is held here, and learns what they hold."""
        self._denied.clear()
        mine = np.stack([part.numbers() for part in self.parts])
        # other ranks may have more parts
        most = max([len(self.parts), *map(len, self._elsewhere)])
        theirs = self.ranks.other_numbers(np.pad(mine, [(0, most - len(self.parts)), (0, 0)]))
        for parts, numbers in zip(self._elsewhere, theirs):
            for part, of_part in zip(parts, numbers):
                part.note(of_part)

    def take_moves(self) -> list[tuple[int, int]]:
        """Returns and forgets the old and the new slot of each request that `make_room` has moved, in order."""
        moves, self._moves = self._moves, []
        return moves

    def _size_for(self, slot: int | None, tokens: int, shared: int = 0) -> tuple[int, int] | None:
        """Returns numbers of slots and of tokens in each with room for `make_room`; None if there are none."""
        slots, longest = self._least_size(slot, tokens)
        if slots > self.room.most or longest > self.longest:
            return None
        need, left = self.need(slot, tokens) - self._not_taken(shared), self.unreserved
        if slots <= self.count and longest <= self.room.tokens and (need <= left).all():
            return self.count, self.room.tokens
        wanted = np.array([slots, longest, *(self.max_pages + 1 - left + need)])
        # ranks need not ask each other again for what was denied
        if any((wanted >= denied).all() for denied in self._denied):
            return None
        sizes, here = self.room.sizes_for(slots, longest), wanted[2 : 2 + len(self.parts)]
        fit = self.ranks.all_of([bool((self.room.limits(*size) >= here).all()) for size in sizes])
        if not any(fit):
            self._denied.append(wanted)
        return next((size for size, fits in zip(sizes, fit) if fits), None)

    def _least_size(self, slot: int | None, tokens: int) -> tuple[int, int]:
        """Returns the numbers of slots and of tokens in each that all requests need, with that of `make_room`."""
        longest = max((self._seen[taken] + self._reserved.get(taken, 0) for taken in self._taken), default=0)
        return len(self._taken) + (slot is None), max(longest, tokens + (0 if slot is None else self._seen[slot]))

    def _not_taken(self, shared: int) -> np.ndarray:
        """Returns the pages, by part, that a request need not take if its first `shared` tokens are another's."""
        return np.array([part.bounds.full_pages(shared) if part.shares else 0 for part in self.all_parts])

    def _lower_for(self, slot: int | None, tokens: int, shared: int = 0) -> bool:
        """Lowers rows for what `_size_for` finds no room for. Returns whether any were, perhaps still too few."""
        size = self._least_size(slot, tokens)
        if self.rungs is None or size[0] > self.room.most or size[1] > self.longest:
            return False
        if slot is not None:
            return self.rungs.lower_for(slot, tokens, self.room.sizes_for(*size)[1:], self._requests())
        need = self.need(None, tokens) - self._not_taken(shared)
        return self.rungs.lower_for_waiting(need, self.room.sizes_for(*size)[1:], self._requests())

    def _requests(self) -> PlannedRequests:
        coming = {slot: self._reserved.get(slot, 0) for slot in sorted(self._taken)}
        return PlannedRequests(coming, self._seen, self.room)

    def reclaimable(self) -> np.ndarray:
        """Returns the pages that lowering would free, by part."""
        if self.rungs is None:
            return np.zeros(len(self.all_parts), dtype=np.int64)
        return self.rungs.reclaimable(self._taken)

    def least_need(self, slot: int | None, tokens: int) -> np.ndarray:
        """Returns the pages that `tokens` more tokens need if rows are lowered, before `reclaimable` is subtracted."""
        if self.rungs is None or slot is None:
            return self.need(slot, tokens)
        return self.rungs.least_need(slot, self._seen[slot], tokens)

    def rung_counts(self) -> RungCounts | None:
        """Returns what each rung holds; None if no rows are lowered. Only after `settle`."""
        return None if self.rungs is None else self.rungs.counts(sorted(self._taken), self.longest)

    def _move(self, slot: int, to: int) -> None:
        for holder in (*self.all_parts, *self._others):
            holder.move(slot, to)
        self._moves.append((slot, to))
        self._taken = self._taken - {slot} | {to}
        self._seen[to], self._seen[slot] = self._seen[slot], 0
        if slot in self._reserved:
            self._reserved[to] = self._reserved.pop(slot)

    def adopt(self, tokens: int = 0) -> int:
        """Gives an idle slot to a request that has no tokens yet. Raises `MemoryError` if all are taken.

        Args:
            tokens: tokens of its prompt, by which its rung is chosen.
        """
        if not self.idle:
            raise MemoryError(f"all {self.count} slots are taken.")
        slot = min(set(range(self.count)) - self._taken)
        self._taken.add(slot)
        if self.rungs is not None:
            self.rungs.enter(slot, tokens)
        return slot

    def release(self, slot: int) -> None:
        """Frees the slot and all that its request holds, even after a failed `load`."""
        for part in self.parts:
            if self._seen[slot]:
                part.clear(slot)
            part.withdraw(slot)
        for other in self.all_parts[len(self.parts) :]:
            other.release(slot)
        self._seen[slot] = 0
        self._denied.clear()
        if self.rungs is not None:
            self.rungs.note_release()
        self._reserved.pop(slot, None)
        self._taken.remove(slot)

    def load(self, slot: int, sources: Iterable[Store], tokens: int, alike: int | None = None) -> None:
        """Copies the one request that `sources` hold into `slot`, which is adopted and has no tokens yet.

        Args:
            sources: stores of the same configuration and shape, settled and without padding, one for each part.
            tokens: number of tokens that the request is going to have, including these.
            alike: slot whose request begins alike; full pages of the same content are shared with it.

        Raises:
            MemoryError: no room for `tokens` tokens, or the device has no memory. The slot can only be released then.
        """
        by_layers = {tuple(source.layers): source for source in sources}
        pairs = [(part, by_layers[tuple(part.store.layers)]) for part in self.parts]
        loaded = [(part, source, part.entries(source, alike)) for part, source in pairs]
        need = np.array([part.need_of(source, tokens) - entries.shared_pages for part, source, entries in loaded])
        if self.rungs is not None and (need > self.unreserved).any():
            # rows whose pages are to be shared stay as they are
            self.rungs.lower_for_waiting(need, [(self.count, self.room.tokens)], self._requests(), keep=alike)
        if any(pages > part.unreserved for part, pages in zip(self.parts, need)):
            raise MemoryError(f"there are not enough pages for a request of {tokens} tokens.")
        for part, _, entries in loaded:
            part.provide(entries.pages)
        for part, source, entries in loaded:
            self._seen[slot] = source.seen
            part.load(slot, source, entries)

    def held(self, slot: int) -> list[Store]:
        """Returns the request in `slot` as a store for each part, which uses the slot's memory until it changes."""
        for part in self.parts:
            settle(part.store)
        return [stage(part.store, slot, self._seen[slot], part.store.pool) for part in self.parts]

    def fork(self, slot: int) -> int | None:
        """Copies the request in `slot` to another slot and returns that, or None without room. After `make_room`.

        Raises:
            MemoryError: the device has no memory; nothing has changed then.
        """
        if not self.idle or any(part.copied(slot) > part.unreserved for part in self.all_parts):
            return None
        with self.ranks.in_step():
            for part in self.parts:
                part.provide(part.copied(slot))
        twin = self.adopt()
        self._seen[twin] = self._seen[slot]
        try:
            for part in self.all_parts:
                part.copy(slot, twin)
        except BaseException:
            self.release(twin)
            raise
        return twin

    def settle(self) -> None:
        """Ends the last forward: runs the compaction after it and takes back every reservation."""
        self._forward.clear()
        self._reserved.clear()
        if self.rungs is not None:
            self.rungs.begin_forward()
        with self.ranks.in_step():
            for part in self.parts:
                part.settle()
        for other in self.all_parts[len(self.parts) :]:
            other.settle()
        self._tell()

    def need(self, slot: int | None, tokens: int) -> np.ndarray:
        """Returns the most pages that `tokens` more tokens need, by part. Only after `settle`.

        Args:
            slot: slot of the request; None if it has none yet.
        """
        seen = 0 if slot is None else self._seen[slot]
        return np.array([part.need(slot, seen, tokens) for part in self.all_parts])

    def reserve(self, slot: int, tokens: int) -> bool:
        """Reserves what `tokens` more tokens need, including compaction. Returns False if there is too little."""
        need = self.need(slot, tokens)
        promised = np.array([part.promised(slot) for part in self.all_parts])
        if (need - promised > self.unreserved).any():
            return False
        self._reserved[slot] = tokens
        for part, pages in zip(self.all_parts, need):
            part.reserve(slot, int(pages))
        return True

    def begin(self, forward: Sequence[tuple[int, int]]) -> None:
        """Starts a forward for which everything is reserved.

        Args:
            forward: slot and number of its new tokens, in the order in which they are packed; each slot once.

        Raises:
            MemoryError: the device has no memory for what was reserved.
        """
        with self.ranks.in_step():
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
        self._steps = [slot for slot, _ in steps]
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
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        if self._step_slots.numel():
            given = []
            for tensor in (query, key, value):
                rows = tensor.new_zeros(self.count, tensor.shape[1], 1, tensor.shape[3])
                rows[self._step_slots, :, 0] = tensor[0, :, self._step_at].transpose(0, 1)
                given.append(rows)
            stepped = self.attend_steps(layer, given, softmax, self._stepping)
            output[0, :, self._step_at] = stepped[self._step_slots, :, 0].transpose(0, 1)
        part, place = self._places[layer]
        for slot, at, tokens in self._forward:
            if slot in self.failures:
                continue
            mine = slice(at, at + tokens)
            asked, *new = (tensor[:, :, mine] for tensor in (query, key, value))
            try:
                output[:, :, mine] = PromptAttention(part.staged[slot], place, *new).attend(asked, softmax)
            except (ValueError, *NO_MEMORY) as error:
                self.failures[slot] = error
        return output

    def attend_steps(self, layer: int, rows: Sequence[Tensor], softmax: Softmax, stepping: Tensor) -> Tensor:
        """Attends from one token of each slot that has one, and stores it.

        Args:
            rows: query [slots, query_heads, 1, key_dim], key and value [slots, heads, 1, dim].
            stepping: bool [slots], which of them have one.

        Returns:
            [slots, query_heads, 1, value_dim] in the query's dtype.
        """
        part, place = self._places[layer]
        query, key, value = rows
        return StepAttention(part.store, place, key, value, stepping).attend(query, softmax)

    def only_steps(self) -> list[int]:
        """Returns the slots of the running forward if each has one token after others and no key is centred."""
        centers = any(part.store.centers_soon for part in self.parts)
        return [] if self._forward or centers else self._steps

    def take_failures(self) -> dict[int, Exception]:
        """Returns and forgets the errors of the forward that has just run, here or on another rank, by slot.

        The requests in these slots can only be released.
        """
        for store in [part.store for part in self.parts if self._step_slots.numel()]:
            spoiled = store.spoiled(self._step_slots)
            self.failures.update({slot: unstorable(store.config, store.value_limit) for slot in spoiled})
        failures, self.failures = self.failures, {}
        return self.ranks.all_failures(failures)
