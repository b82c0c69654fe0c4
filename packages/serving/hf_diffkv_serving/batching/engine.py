"""The parts of Transformers' continuous batching engine that are replaced.

Importing this module checks that the engine is as expected.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import reprlib
from collections.abc import Callable
from typing import Any

import torch

from hf_diffkv.compat import Feature, PrivateName, parameters_of

from ..compat import BATCHING
from .captured_steps import CapturedSteps
from .engine_cache import ContinuousCache
from .engine_names import (
    SCHEDULER_MAPPING,
    ContinuousBatchProcessor,
    PagedAttentionCache,
    RequestState,
    RequestStatus,
    Scheduler,
    children,
)
from .order import LOOK_AHEAD, AdmissionOrder
from .records import Records


def _asked() -> Feature:
    """Returns the methods that the engine calls on its cache."""
    owner = f"{PagedAttentionCache.__module__}:{PagedAttentionCache.__name__}"
    ours = [name for name, member in vars(ContinuousCache).items() if inspect.isfunction(member)]
    shared = [name for name in ours if hasattr(PagedAttentionCache, name) and not name.startswith("__")]
    parameters = (" ".join(parameters_of(getattr(ContinuousCache, name)) or ()) for name in shared)
    return Feature(BATCHING.lost, tuple(map(PrivateName, [owner] * len(shared), shared, parameters)))


_logger = logging.getLogger("hf_diffkv")
CALLED = _asked()
CALLED.require()


class _Admission:
    """Scheduler mixin that refuses requests that can never fit, continues when there is nothing left to wait for,
    orders waiting requests, and keeps records.

    Attributes:
        cancelled: function called with each cancelled request once it is gone.
        vocabulary: number of token ids that the model embeds.
    """

    cache: ContinuousCache
    order: AdmissionOrder
    records: Records
    cancelled: Callable[[RequestState], None]
    vocabulary: int

    def add_waiting_request(self, state: RequestState) -> None:
        """Raises `ValueError` for a request that could not finish even alone; the engine then fails it.

        Likewise for one with invalid token ids, or with the name of another request.
        """
        if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
            raise ValueError(
                f"request_id={state.request_id!r} belongs to a request that has not finished; choose another."
            )
        record = self.records.open(state.request_id, len(state.initial_tokens))
        odd = [each for each in state.initial_tokens if not _is_integer(each)]
        if odd:
            raise ValueError(
                f"the prompt holds {reprlib.repr(odd[0])} where token ids are expected; tokenise texts, and pass each "
                "prompt as a list of integers."
            )
        wrong = [token for token in state.initial_tokens if not 0 <= token < self.vocabulary]
        if wrong:
            raise ValueError(
                f"the prompt has token ids {wrong[:3]}, but the model has embeddings for 0 to {self.vocabulary - 1}; "
                "use the model's own tokenizer."
            )
        limit = self.cache.check_request(len(state.initial_tokens), state.max_new_tokens)
        if state.max_new_tokens is None:
            state.max_new_tokens = state._new_tokens_limit = limit
        # a preempted request keeps its cuts
        if not state._true_initial_tokens:
            self.cache.beginnings.add(state.request_id, state.initial_tokens, record.boundaries)
        super().add_waiting_request(state)

    def _schedule_request(
        self,
        state: RequestState,
        request_tokens: list[int],
        token_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> None:
        # the engine forks a request before the last token of its prompt, and fails if no other is to be computed
        if state.num_children and len(request_tokens) == 1:
            names, state.num_children = children(state.request_id, state.num_children), 0
            for name in names:
                child = state.create_equivalent_initial_request()
                child.request_id = name
                self.add_waiting_request(child)
        if self.cache.prefixes is not None and state.status != RequestStatus.DECODING:
            cut = self.cache.beginnings.next_cut(state.request_id, state.position_offset)
            token_budget = token_budget if cut is None else min(token_budget, cut - state.position_offset)
        super()._schedule_request(state, request_tokens, token_budget, request_ids_to_remove_from_waiting)

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        # a preempted request no longer holds anything
        if state is not None and state.status == RequestStatus.FINISHED and self.cache.holds(request_id):
            self.cache.keep_prefix(request_id, state.initial_tokens + state.generated_tokens)
            self.cache.beginnings.remove(request_id)
            said = state.generated_tokens[-1:]
            self.records.close(request_id, "stop" if state._eos_token_ids.intersection(said) else "length")
        super().finish_request(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        states = super().clear_cancelled_requests()
        for state in states:
            self.cache.beginnings.remove(state.request_id)
            self.cancelled(state)
        return states

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        before = state.position_offset
        tokens = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        if before == 0:
            # also if nothing was found: a preempted request may have begun with a prefix that is gone
            self.cache.beginnings.resume(state.request_id, state.position_offset)
        if state.position_offset > before:
            self.records.note_prefix(state.request_id, state.position_offset)
        return tokens

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
        # if nothing else is to be computed, a prefix is read immediately
        busy = bool(self.active_requests)
        expected = self.cache.expect(first, busy)
        order = self.order.sort(names, expected, busy)
        if self.cache.prefixes is not None:
            kept = {name: found.tokens for name, found in expected.items()}
            under_way = [state for state in self.active_requests.values() if state.status == RequestStatus.PREFILLING]
            positions = {state.request_id: state.position_offset for state in under_way}
            order = self.cache.beginnings.without_twins(order[:LOOK_AHEAD], kept, positions) + order[LOOK_AHEAD:]
        return [self.waiting_requests[name] for name in order]


@functools.cache
def scheduler_class(name: str) -> type[Scheduler]:
    """Returns the engine's scheduler of that name, with admission by the compressed cache."""
    if name not in SCHEDULER_MAPPING:
        raise ValueError(f"scheduler_type={name!r} is unknown; use one of {sorted(SCHEDULER_MAPPING)}.")
    base = SCHEDULER_MAPPING[name]
    return type(f"DiffKV{base.__name__}", (_Admission, base), {})


class DiffKVBatchProcessor(ContinuousBatchProcessor):
    """Fails only the request whose part of a forward went wrong, and counts tokens."""

    cache: ContinuousCache
    prompt_tokens = generated_tokens = 0
    # stands in for the model if steps are captured
    captured: CapturedSteps | None = None

    def _generation_step(self, model: Any) -> None:
        stream = self.inputs_and_outputs.compute_stream
        if stream is not None:
            # compaction, copies of prefixes and forks run on the current stream, the forward on its own
            stream.wait_stream(torch.cuda.current_stream(self.model_device))
        super()._generation_step(model if self.captured is None else self.captured)

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        # clients also wait for forks that are still to come
        names = children(state.request_id, state.num_children)
        state.num_children = 0
        self._fail(error, state)
        for name in names:
            self._fail(error, RequestState(name, state.initial_tokens))

    def _fail(self, error: Exception, state: RequestState) -> None:
        """Fails a request. Another one of the same name continues and keeps its own text."""
        waiting = self.scheduler.waiting_requests.get(state.request_id)
        known = self.scheduler.active_requests.get(state.request_id, waiting)
        if known is not None and known is not state:
            self.output_router.fail_and_deliver(state, error)
            return
        self.scheduler.records.close(state.request_id, "error")
        self.cache.beginnings.remove(state.request_id)
        super()._handle_request_error(error, state)

    def fail_all_requests(self, error: Exception) -> None:
        """Fails all requests. Notifies all before freeing memory, which a failed device may not allow."""
        for state in self.scheduler.active_requests.values():
            self._handle_request_error(error, state)
        self.scheduler.active_requests.clear()
        super().fail_all_requests(error)
        try:
            self.cache.free_all_requests()
        except Exception:
            _logger.exception("memory held by requests cannot be released")

    def update_batch(self) -> None:
        """Hands out the new tokens of the forward that has just run."""
        failures = self.cache.take_failures()
        for future in self.inputs_and_outputs.requests_in_batch:
            state = future.state
            if state.request_id in failures:
                self._handle_request_error(failures[state.request_id], state)
                self.scheduler.finish_request(state.request_id)
                # the token that was computed for it is dropped
                future.state = _nobody()
                continue
            if state.generated_len() == 0:
                self.prompt_tokens += future.query_length
            if future.has_new_token:
                self.generated_tokens += 1
                self.scheduler.records.note_token(state.request_id)
        super().update_batch()


def _is_integer(token: Any) -> bool:
    try:
        operator.index(token)
    except TypeError:
        return False
    return True


def _nobody() -> RequestState:
    state = RequestState(request_id="", initial_tokens=[0], max_new_tokens=None)
    state._status = RequestStatus.DECODING
    return state
