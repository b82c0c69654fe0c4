"""Cache for Transformers' continuous batching engine on slots of compressed stores.

The engine counts memory in blocks of a request. Here a block is a page, and a request's need is an upper bound
whose unused rest is given back after each forward. Names and arguments are those of `PagedAttentionCache`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_diffkv.cache.errors import HandOverError
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages.reserve import NO_MEMORY
from hf_diffkv.prefixes.stats import ExpectedPrefix

from .attention import PackedCache
from .beginnings import Beginnings
from .first_tokens import FirstTokens
from .memory import Moment, ServingMemory
from .slots import Slots

if TYPE_CHECKING:
    from .linear_layers import LinearModule
    from .linear_states import LinearStates
    from .sliding import SlidingWindows

# content of the placeholders in prompts, which have no images
TEXT_ALONE: dict[str, Any] = {}
_logger = logging.getLogger("hf_diffkv")


@dataclass(frozen=True)
class ServingStatistics:
    """State of continuous batching at this moment, and counts since its start.

    Attributes:
        memory: memory at this moment.
        waiting: number of requests without memory, including preempted ones.
        prompt_tokens: number of computed prompt tokens; a preempted request counts again.
        generated_tokens: number of tokens handed out.
        preemptions: number of times that a request lost its memory to others.
    """

    memory: ServingMemory
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int = 0


class _Pool:
    """Pool that the scheduler calls before it forms a batch, and the processor before it forks."""

    def __init__(self, cache: ContinuousCache) -> None:
        self._cache = cache

    def try_to_free_sectors(self) -> None:
        self._cache.slots.settle()
        self._cache.publish()


class _Allocator:
    """Allocator for the layers of one kind; there is one kind."""

    layer_type = "full_attention"
    index = 0
    blocks_per_sector = tokens_per_page = 1
    read_trash_index = write_trash_index = 0

    def __init__(self, cache: ContinuousCache) -> None:
        self._cache = cache
        self.bytes_per_block = cache.bytes_per_sector
        # blocks have no content of their own to be swapped out
        self.block_table: dict[str, list[int]] = {}

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> np.ndarray:
        # the engine only passes it on to `count_storable_requests`
        return self._cache.least_need(request_id, query_length)


class ContinuousCache(PackedCache):
    """Takes the place of the engine's `PagedAttentionCache`.

    Args:
        slots: slots that hold the requests, in full-attention layers.
        full_layers: indices of these layers in the model.
        max_batch_tokens: maximum tokens per forward, over all requests.
        sliding: windows of the requests in sliding-window layers, if there are any.
        linear: states of the requests in linear attention, if there is any.
    """

    # nothing is shared between requests, read by index, or read by a kernel of the engine
    allow_block_sharing = False
    read_cache_limit = max_blocks_per_request = max_decode_fast_path_length = 0
    max_tokens_read = 1

    def __init__(
        self,
        slots: Slots,
        full_layers: Sequence[int],
        max_batch_tokens: int,
        sliding: SlidingWindows | None = None,
        linear: LinearStates | None = None,
    ) -> None:
        self.slots, self.sliding, self.linear = slots, sliding, linear
        # index in the slots of each full-attention layer
        self._place_of = {layer: place for place, layer in enumerate(full_layers)}
        self.max_batch_tokens = max_batch_tokens
        self.device, self.dtype = slots.device, slots.dtype
        self.num_blocks = sum(part.max_pages for part in slots.parts)
        # the engine uses it to swap blocks out, which is not done here
        self.bytes_per_sector = max(part.store.layout.page_bytes for part in slots.parts)
        self.pool = _Pool(self)
        self.cache_allocators = {_Allocator.layer_type: _Allocator(self)}
        self.peak_bytes = self.bytes
        # requests that lost their memory to others
        self.preemptions = 0
        # a `PrefixStore` if prefixes are kept
        self.prefixes: Any = None
        self.beginnings = Beginnings()
        self._last_layer = max((*full_layers, *(() if sliding is None else sliding.layers)))
        self._slot_of: dict[str, int] = {}
        # first tokens of requests with a slot if prefixes are kept
        self._began = FirstTokens()
        self._coming: list[tuple[str, int]] = []
        # prompts of waiting requests, and the prefixes they will find
        self._prompts: dict[str, Tensor] = {}
        self._expected: dict[str, ExpectedPrefix] = {}
        # requests that cannot share the pages that they were expected to
        self._differs: set[str] = set()
        # whether the request looked up last has a prefix but no room for its prompt
        self._no_room = False
        # whether the last request that asked for memory got none
        self._lacks_memory = False
        # when the engine last had nothing under way; may be read during its first step too
        self._finished = self._moment()

    @property
    def bytes(self) -> int:
        """Bytes the device holds for all requests."""
        return self.slots.bytes + sum(other.bytes for other in (self.sliding, self.linear) if other is not None)

    def places_beside(self, waiting: int) -> int:
        """Returns how many requests may join those that hold memory and `waiting` others; 0 if these lack memory."""
        return 0 if waiting and self._lacks_memory else max(0, self.slots.room.most - len(self._slot_of) - waiting)

    def memory(self) -> ServingMemory:
        """Returns the memory at this moment, or, on other threads than the engine's, after its last finished step."""
        finished = self._finished
        return self._moment().memory if finished.thread == threading.get_ident() else finished.memory

    def publish(self) -> None:
        """Shows other threads this moment's memory while nothing is under way, without waiting for the device."""
        self._finished = self._moment()

    def _moment(self) -> Moment:
        return Moment(self.slots, len(self._slot_of), self.bytes, self.peak_bytes)

    def check_request(self, prompt_tokens: int, max_new_tokens: int | None) -> int:
        """Returns the number of new tokens that a request may have if it is alone.

        Args:
            max_new_tokens: most new tokens; None for as many as there is room for.

        Raises:
            ValueError: there is not enough room, no prompt, or `max_new_tokens` is no positive integer.
        """
        if prompt_tokens == 0:
            raise ValueError("the prompt is empty; a request needs at least one token.")
        if max_new_tokens is not None and (not isinstance(max_new_tokens, Integral) or max_new_tokens < 1):
            raise ValueError(f"max_new_tokens={max_new_tokens} must be a whole number of at least 1, or None.")
        # the last token is never stored
        allowed = self.slots.longest + 1 - prompt_tokens
        wanted = 1 if max_new_tokens is None else max_new_tokens
        if wanted > allowed:
            raise ValueError(
                f"a request of {prompt_tokens} prompt tokens and {wanted} new ones needs room for "
                f"{prompt_tokens + wanted - 1}, but the longest possible request has {self.slots.longest} tokens, "
                f"which the model's positions, the planned lengths and max_bytes={self.slots.max_bytes} limit; shorten "
                "the prompt, or ask for fewer new tokens."
            )
        return allowed if max_new_tokens is None else max_new_tokens

    def least_need(self, request_id: str, tokens: int) -> np.ndarray:
        """Returns the pages that `tokens` more tokens of a request need, like `Slots.least_need`."""
        return self.slots.least_need(self._slot_of.get(request_id), tokens)

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        slot = self._slot_of.get(state.request_id)
        # part of it could be computed, but its kept prefix is worth waiting for
        waits = slot is None and self._no_room
        self._no_room = False
        if waits or not self._make_room(slot, request_len):
            return False
        if not dry_run:
            slot = self._slot_of.get(state.request_id)
            if slot is None:
                slot = self._adopt(state.request_id, state.initial_tokens)
            self.slots.reserve(slot, request_len)
        return True

    def _adopt(self, request_id: str, input_ids: Sequence[int]) -> int:
        slot = self._slot_of[request_id] = self.slots.adopt(len(input_ids))
        if self.prefixes is not None:
            self._began.add(request_id, torch.tensor(input_ids))
        return slot

    def _make_room(self, slot: int | None, tokens: int, shared: int = 0) -> bool:
        """Calls `Slots.make_room`, and notes the new slots of requests that were moved."""
        made = self.slots.make_room(slot, tokens, shared)
        self._lacks_memory = not made
        for old, new in self.slots.take_moves():
            name = next(name for name, place in self._slot_of.items() if place == old)
            self._slot_of[name] = new
        return made

    def count_storable_requests(self, list_blocks_needed: list[dict[str, np.ndarray]]) -> int:
        left = self.slots.unreserved + self.slots.reclaimable()
        for count, needed in enumerate(list_blocks_needed):
            left = left - sum(needed.values())
            if (left < 0).any():
                return count
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        free = np.maximum(0, self.slots.unreserved + self.slots.reclaimable())
        if relative:
            return float((free / np.maximum(1, self.slots.max_pages)).min())
        return sum(int(pages) * part.store.layout.page_bytes for pages, part in zip(free, self.slots.parts))

    def holds(self, request_id: str) -> bool:
        """Whether a request has a slot."""
        return request_id in self._slot_of

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        slot = self._slot_of.pop(request_id, None)
        # the engine passes this flag for requests that it puts back
        self.preemptions += no_cache and slot is not None
        self._began.remove(request_id)
        self._differs.discard(request_id)
        if slot is not None:
            self.slots.release(slot)
            if self.sliding is not None:
                self.sliding.release(request_id)
            self.publish()

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        for request_id in list(self._slot_of):
            self.free_blocks(request_id)
        self._coming.clear()
        self._prompts, self._expected = {}, {}
        self.beginnings.clear()
        self.slots.settle()
        self.publish()

    def reset(self) -> None:
        self.free_all_requests()

    @property
    def use_prefix_sharing(self) -> bool:
        return self.prefixes is not None

    def expect(self, waiting: dict[str, list[int]], load: bool) -> dict[str, ExpectedPrefix]:
        """Announces waiting requests, by name with their prompts. Returns the prefix that each will find.

        While there is no place for any of them, the store is asked only if they have changed.

        Args:
            load: whether to load their prefixes meanwhile.
        """
        known = waiting.keys() == self._expected.keys()
        if self.prefixes is None or known and not (waiting and self.slots.has_place):
            return self._expected
        self._prompts = {name: self._prompts.get(name, torch.tensor(ids)) for name, ids in waiting.items()}
        found = [ExpectedPrefix()] * len(waiting)
        try:
            found = self.prefixes.look_ahead(list(self._prompts.values()), load, [TEXT_ALONE] * len(waiting))
        except (OSError, *NO_MEMORY) as error:
            _logger.warning("prefixes cannot be looked up: %s", error)
        self._expected = dict(zip(self._prompts, found))
        self._differs.intersection_update(waiting)
        return self._expected

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Gives a waiting request a slot with the longest kept prefix. Returns the number of its tokens."""
        prompt = torch.tensor(prompt_ids)
        expected = self._expected.get(request_id, ExpectedPrefix()).tokens
        # a request that was not announced may have a prefix too
        first = prompt[: expected or len(prompt_ids)]
        alike, common = self._began.alike(first, lambda name: self.slots.seen(self._slot_of[name]))
        shared = 0 if request_id in self._differs else min(common, expected)
        if not self._make_room(None, len(prompt_ids), shared):
            self._no_room = expected > 0
            return 0
        try:
            cache = self.prefixes.lookup(prompt, TEXT_ALONE)
        except NO_MEMORY as error:
            _logger.warning("a stored prefix cannot be used, so its tokens are computed: %s", error)
            return 0
        length = cache.get_seq_length()
        if length:
            slot = self._adopt(request_id, prompt_ids)
            try:
                twin = None if alike is None else self._slot_of[alike]
                self.slots.load(slot, cache.stores.all, len(prompt_ids), twin)
            except NO_MEMORY as error:
                _logger.info("request %s cannot begin with a stored prefix: %s", request_id, error)
                self.free_blocks(request_id)
                # it waits for its own pages, once, if other requests can give some back
                self._no_room = bool(self._slot_of) and request_id not in self._differs
                self._differs.add(request_id)
                return 0
            if self.sliding is not None:
                self.sliding.load(request_id, {layer: cache.layers[layer] for layer in self.sliding.layers})
        return length

    def keep_prefix(self, request_id: str, input_ids: list[int]) -> None:
        """Keeps what a request holds, if prefixes are kept."""
        slot = self._slot_of.get(request_id)
        if self.prefixes is not None and slot is not None:
            held = self.slots.held(slot)
            try:
                others = {} if self.sliding is None else self.sliding.dense_layers(request_id, self.slots.seen(slot))
                self.prefixes.insert_request(torch.tensor(input_ids), held, others)
            except NO_MEMORY as error:
                _logger.warning("a prefix is not stored: %s", error)

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        return {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Keeps a request's prefix at a cut. Called for each request after a forward."""
        slot = self._slot_of.get(state.request_id)
        if self.prefixes is not None and slot is not None and not state.generated_tokens:
            seen = self.slots.seen(slot)
            if self.beginnings.is_cut(state.request_id, seen):
                self.keep_prefix(state.request_id, state.initial_tokens[:seen])

    def evict_cached_blocks(self) -> bool:
        return False

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: dict) -> list[str]:
        """Copies a request to those of `dst_req_ids` for which there is room, and returns them."""
        # a failed request has no slot, and no children to come
        for count, request_id in enumerate(dst_req_ids):
            made = self._make_room(None, 0)
            source = self._slot_of.get(src_state.request_id)
            try:
                twin = self.slots.fork(source) if made else None
            except NO_MEMORY as error:
                _logger.warning("request %s computes its prompt itself: %s", request_id, error)
                twin = None
            if twin is None:
                return dst_req_ids[:count]
            self._slot_of[request_id] = twin
            self._began.copy(src_state.request_id, request_id)
            if self.sliding is not None:
                self.sliding.fork(src_state.request_id, request_id, self.slots.seen(source))
            if self.linear is not None:
                self.linear.fork(source, twin)
        return dst_req_ids

    def perform_cache_copy(self, copy_src_and_dst: dict) -> None:
        return None

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        raise NotImplementedError("no kernel of the engine reads this cache.")

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: list | None, write_index: list
    ) -> None:
        """Notes a request of the batch. Called for each one, in the order in which they are packed."""
        if self.slots.seen(self._slot_of[request_id]) != past_length:
            raise RuntimeError(
                f"request {request_id} continues after {past_length} tokens but "
                f"{self.slots.seen(self._slot_of[request_id])} are stored; please report it."
            )
        self._coming.append((request_id, query_length))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax: Softmax,
        sliding_window: int | None = None,
    ) -> Tensor:
        """Computes the attention of a layer.

        Args:
            sliding_window: window that the model passes; unused, as the layers' windows are known.

        Other arguments and the result are those of `Slots.attend`.
        """
        self._begin()
        place = self._place_of.get(layer)
        if place is None:
            output = self.sliding.attend(layer, query, key, value, softmax)
        else:
            output = self.slots.attend(place, query, key, value, softmax)
        if layer == self._last_layer:
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return output

    def begin_steps(self) -> list[int]:
        """Starts the forward. Returns `Slots.only_steps`."""
        self._begin()
        return self.slots.only_steps()

    def attend_steps(self, layer: int, rows: Sequence[Tensor], softmax: Softmax, stepping: Tensor) -> Tensor:
        """Computes the attention of a full-attention layer, like `Slots.attend_steps`."""
        return self.slots.attend_steps(self._place_of[layer], rows, softmax, stepping)

    def run_linear(self, module: LinearModule, hidden_states: Tensor) -> Tensor:
        """Runs a module that keeps states on the packed tokens, like `LinearStates.run`."""
        if self.linear is None:
            raise RuntimeError(f"{type(module.module).__name__} keeps states that no request holds; please report it.")
        self._begin()
        return self.linear.run(module, hidden_states)

    def _begin(self) -> None:
        """Starts the forward with its first layer."""
        if not self._coming:
            return
        coming, self._coming = self._coming, []
        if self.sliding is not None:
            self.sliding.begin([(name, self.slots.seen(self._slot_of[name]), tokens) for name, tokens in coming])
        forward = [(self._slot_of[name], tokens) for name, tokens in coming]
        if self.linear is not None:
            self.linear.begin([(slot, self.slots.seen(slot), tokens) for slot, tokens in forward])
        self.slots.begin(forward)

    def take_failures(self) -> dict[str, Exception]:
        """Returns and forgets the errors of the forward that has just run, by request.

        Raises:
            HandOverError: the forward did not attend through this cache.
        """
        if self._coming:
            raise HandOverError(
                "the model ran without attending to its requests: its attention was switched while the manager was "
                "running. Stop the manager before using the model for anything else, or use pause()."
            )
        failures = self.slots.take_failures()
        return {name: failures[slot] for name, slot in self._slot_of.items() if slot in failures}
