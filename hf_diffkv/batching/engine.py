"""The parts of Transformers' continuous batching engine that are replaced, and whether they are what they should be.

All names of Transformers here are private to it. They were read in release 5.23, and importing this module checks them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers

from ..cache.private_names import PrivateName, changed, parameters_of
from .engine_cache import ContinuousCache
from .order import LOOK_AHEAD, AdmissionOrder

OLDEST = (5, 23)
_REMEDY = "generate() works with this release; please report it with the release's number"


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


if _version() < OLDEST:
    raise ImportError(
        f"continuous batching with cache_implementation='diffkv' needs transformers>={'.'.join(map(str, OLDEST))}, and "
        f"this is {transformers.__version__}; upgrade it, or leave cache_implementation out for continuous batching."
    )

try:
    from transformers.generation.continuous_batching import initialization
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators import CachePool, SlidingAttentionCacheAllocator
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} batches continuously in another way ({error}); {_REMEDY}."
    ) from error

# what is overridden, called or taken the place of
EXPECTED: tuple[PrivateName, ...] = (
    (
        ContinuousBatchingManager,
        "__init__",
        ("model", "generation_config", "continuous_batching_config", "workload_hints"),
    ),
    (ContinuousBatchingManager, "switch_to_cb_friendly_attn", ("model", "auto_switch_to_flash")),
    (ContinuousBatchingManager, "_create_batch_processor", ()),
    (ContinuousBatchingManager, "_run_generation_loop", ()),
    (ContinuousBatchingManager, "warmup", ()),
    (ContinuousBatchingManager, "start", ()),
    (
        ContinuousBatchProcessor,
        "__init__",
        (
            *("cache", "config", "generation_config", "continuous_batching_config", "logit_processor", "input_queue"),
            *("cancel_queue", "output_router", "background_thread_status", "model_device", "model_dtype", "scheduler"),
            "distributed_helper",
        ),
    ),
    (ContinuousBatchProcessor, "_handle_request_error", ("error", "state")),
    (ContinuousBatchProcessor, "update_batch", ()),
    (ContinuousBatchProcessor, "reset", ()),
    (Scheduler, "__init__", ("cache", "safety_margin", "max_requests_per_batch")),
    (Scheduler, "add_waiting_request", ("state",)),
    (Scheduler, "schedule_batch", ("token_budget", "cache_budget")),
    (Scheduler, "finish_request", ("request_id",)),
    (Scheduler, "reset", ()),
    (Scheduler, "_get_waiting_candidates", ()),
    (CachePool, "__init__", ("num_sectors", "num_allocators", "num_reserved_sectors")),
    (CachePool, "allocate_sector", ("index",)),
    (
        SlidingAttentionCacheAllocator,
        "__init__",
        (
            *("index", "config", "num_key_value_heads", "cache_dtype", "page_size", "layer_indices"),
            "allow_block_sharing",
        ),
    ),
    (
        SlidingAttentionCacheAllocator,
        "register_cache_tensor",
        ("bytes_per_sector", "non_trash_bytes", "cache_tensor", "pool"),
    ),
    *(
        (SlidingAttentionCacheAllocator, name, ("request_id", "past_length", "query_length"))
        for name in ("allocate_cache_to_request", "get_read_indices", "get_write_indices")
    ),
    (SlidingAttentionCacheAllocator, "get_seqlen_k", ("past_length", "query_length")),
    (SlidingAttentionCacheAllocator, "free_blocks", ("request_id", "no_cache")),
    (SlidingAttentionCacheAllocator, "fork_blocks", ("source_request_id", "dest_request_id", "past_length")),
    (SlidingAttentionCacheAllocator, "copy_blocks", ("source_block_ids", "dest_block_ids")),
    (
        SlidingAttentionCacheAllocator,
        "update",
        ("key_states", "value_states", "layer_idx", "read_index", "write_index"),
    ),
    (initialization, "update_cb_config_after_cache_creation", ("cb_config", "num_blocks", "max_batch_tokens")),
)
FIELDS = ("request_id", "initial_tokens", "max_new_tokens", "num_children", "_new_tokens_limit", "_status")


def surprises() -> list[str]:
    """What of the installed release is not as it is relied on; empty where all is."""
    # the engine calls these on its cache
    ours = [name for name, member in vars(ContinuousCache).items() if inspect.isfunction(member)]
    shared = [name for name in ours if hasattr(PagedAttentionCache, name) and not name.startswith("__")]
    asked = [(PagedAttentionCache, name, parameters_of(getattr(ContinuousCache, name))) for name in shared]
    found = changed((*EXPECTED, *asked))
    fields = inspect.signature(RequestState).parameters
    return found + [f"RequestState.{name}" for name in FIELDS if name not in fields]


if surprises():
    raise ImportError(
        f"transformers {transformers.__version__} changed {', '.join(surprises())}, which continuous batching with "
        f"cache_implementation='diffkv' relies on; {_REMEDY}."
    )


class _Admission:
    """Mixed into a scheduler: refuses what can never fit, goes on where nothing is left to wait for, and orders what
    waits.
    """

    cache: ContinuousCache
    order: AdmissionOrder

    def add_waiting_request(self, state: RequestState) -> None:
        """Raises `ValueError` for a request that could not be finished by itself; the engine fails that one.

        Likewise for one whose name another request has.
        """
        if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
            raise ValueError(f"request_id={state.request_id!r} belongs to a request that is not done; choose another.")
        limit = self.cache.check_request(len(state.initial_tokens), state.max_new_tokens)
        if state.max_new_tokens is None:
            state.max_new_tokens = state._new_tokens_limit = limit
        super().add_waiting_request(state)

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        if state is not None and state.status == RequestStatus.FINISHED:
            self.cache.keep_prefix(request_id, state.initial_tokens + state.generated_tokens)
        super().finish_request(request_id)

    def reset(self) -> None:
        super().reset()
        self.order = AdmissionOrder()

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        # after a preemption, requests wait until another one has finished; it may have been cancelled instead
        if not self.active_requests:
            self.block_new_requests = False
        waiting = list(self.waiting_requests_order)
        scheduled = super().schedule_batch(token_budget, cache_budget)
        self.order.note(waiting, self.active_requests.keys())
        return scheduled

    def _get_waiting_candidates(self) -> list[RequestState]:
        names = list(self.waiting_requests_order)
        first = {name: self.waiting_requests[name].remaining_prefill_tokens for name in names[:LOOK_AHEAD]}
        # where nothing else is to be computed, a prefix is read at once
        busy = bool(self.active_requests)
        order = self.order.sort(names, self.cache.expect(first, busy), busy)
        return [self.waiting_requests[name] for name in order]


@functools.cache
def scheduler_class(name: str) -> type[Scheduler]:
    """The engine's scheduler of that name, with admission by the compressed cache."""
    if name not in SCHEDULER_MAPPING:
        raise ValueError(f"scheduler_type={name!r} is unknown; use one of {sorted(SCHEDULER_MAPPING)}.")
    base = SCHEDULER_MAPPING[name]
    return type(f"DiffKV{base.__name__}", (_Admission, base), {})


class DiffKVBatchProcessor(ContinuousBatchProcessor):
    """Fails a request whose part of a forward went wrong, and that one alone; counts tokens."""

    cache: ContinuousCache
    prompt_tokens = generated_tokens = 0

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        # forks that are still to come are waited for as well
        names = [f"{state.request_id}__child#{i}" for i in range(state.num_children)]
        state.num_children = 0
        super()._handle_request_error(error, state)
        for name in names:
            super()._handle_request_error(error, RequestState(name, state.initial_tokens))

    def update_batch(self) -> None:
        """Hands out the new tokens of the forward that has just run."""
        failures = self.cache.take_failures()
        for future in self.inputs_and_outputs.requests_in_batch:
            state = future.state
            if state.request_id in failures:
                self._handle_request_error(failures[state.request_id], state)
                self.scheduler.finish_request(state.request_id)
                # the token that was computed for it goes nowhere
                future.state = _nobody()
                continue
            if state.generated_len() == 0:
                self.prompt_tokens += future.query_length
            self.generated_tokens += future.has_new_token
        super().update_batch()


def _nobody() -> RequestState:
    state = RequestState(request_id="", initial_tokens=[0], max_new_tokens=None)
    state._status = RequestStatus.DECODING
    return state
