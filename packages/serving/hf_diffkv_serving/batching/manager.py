"""Transformers' continuous batching (`generate_batch`, `ContinuousBatchingManager`) with a compressed cache.

The engine stays Transformers' own: scheduling, packing of prompts and generated tokens, preemption, cancellation and
streaming. It gets another cache, another attention function, and refuses requests that can never fit.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_diffkv.cache.continuous_batching import check_no_call
from hf_diffkv.cache.devices import TensorParallel
from hf_diffkv.cache.errors import HandOverError, UnsupportedModelError
from hf_diffkv.cache.free_memory import budget_of, free_bytes
from hf_diffkv.cache.registration import cache_fields
from hf_diffkv.cache.resolve import harm_for, moments_for

from .beginnings import check_marks
from .borrowed_attention import borrow, give_back, give_back_when_dropped
from .captured_steps import CapturedSteps, captures_steps
from .engine import DiffKVBatchProcessor, scheduler_class
from .engine_cache import ContinuousCache, ServingStatistics
from .engine_names import (
    ContinuousBatchingManager,
    RequestState,
    RequestStatus,
    children,
    initialization,
    knowing_layers,
)
from .linear_layers import LinearModule
from .linear_states import LinearStates
from .memory import ServingMemory
from .ranks import Ranks
from .records import Records, RequestRecord, brought
from .sampling import Sampling, add_sampler, check_logprobs
from .servable import check_servable, model_layers
from .sizes import make_slots, try_attention
from .sliding import SlidingWindows
from .until_full import config_of_slots, lowers, rung_config

# default limit on the tokens per forward, as in Transformers
MAX_BATCH_TOKENS = 8192
NOT_THERE = {
    "use_async_batching": "batches overlap, and memory is counted between them (docs/serving.md)",
    "varlen_compile_config": "the forward is not compiled",
    "decode_compile_config": "the forward is not compiled",
    "default_compile_level": "the forward is not compiled",
    "compile_config": "the forward is not compiled",
    "cpu_offload_space": "preempted requests are recomputed",
}


class DiffKVBatchingManager(ContinuousBatchingManager):
    """A `ContinuousBatchingManager` with a compressed cache. `init_continuous_batching` and its callers make it.

    Args:
        model: model to run.
        fields: fields of `DiffKVConfig`, or a `DiffKVConfig` under "config". `max_bytes` is the budget; if
            `until_full` is named, rows are lowered when it is full.
        generation_config, continuous_batching_config, workload_hints: options of Transformers.
            `max_requests_per_batch` limits the requests in flight. Without `max_bytes`, `max_memory_percent` of the
            free memory is the budget.

    Raises:
        UnsupportedModelError, HandOverError: the model cannot be batched continuously with this cache.
        ValueError: options that this cache does not support.
        MemoryError: the budget cannot hold one request.
    """

    def __init__(
        self,
        model: Any,
        fields: dict[str, Any],
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        self._modules = check_servable(model)
        self._layers = model_layers(model.config)
        self._config = config_of_slots(model, fields.pop("config", None), fields)
        self._longest = _longest(model, workload_hints)
        self._cache: ContinuousCache | None = None
        # a `PrefixStore`, once `use_prefixes` was called
        self.prefixes: Any = None
        # whether its thread was started from here
        self._moving = False
        # the base class would switch the attention back while its loop may still be running
        self._stopping = False
        self.records = Records()
        # error that ended the engine, known before its last outputs arrive
        self.failure: Exception | None = None
        self.model = model
        give_back_when_dropped(model, self)
        options = _checked_options(continuous_batching_config, generation_config)
        self._may_capture = continuous_batching_config.use_cuda_graph is not False
        scheduler_class(options.scheduler_type)
        try:
            with knowing_layers():
                super().__init__(model, generation_config, options, workload_hints)
            add_sampler(self.logit_processor, generation_config.do_sample)
            shape, self._states = try_attention(model, self._layers, self._modules)
            self._shape = replace(shape, ranks=self._ranks())
            self._take_over()
            self._cache = self._make_cache()
        except BaseException:
            self._restore_attention()
            raise

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Switches `model` to the packed attention.

        Raises:
            ModelInUseError: a `generate()` call needs a different attention.
        """
        check_no_call(model)
        borrow(model, self)
        self._take_over()
        self._stopping = False

    def _take_over(self) -> None:
        for module in self._modules:
            module.take_over(self._run_linear)

    def _run_linear(self, module: LinearModule, hidden_states: Tensor) -> Tensor:
        if self._cache is None:
            raise HandOverError("the model ran while its manager held no requests; stop the manager before using it.")
        return self._cache.run_linear(module, hidden_states)

    @property
    def replaces_layers(self) -> bool:
        """Whether layers of the model run differently while the manager uses it."""
        return bool(self._modules)

    def start(self) -> None:
        """Starts the manager, or restarts it after a `stop`.

        Raises:
            MemoryError: the budget, a share of what is free, can no longer hold a request.
        """
        if not self.is_running():
            self.switch_to_cb_friendly_attn(self.model)
            if self.failure is not None:
                # a change that it had begun may be half done
                self._cache = self.batch_processor = self.failure = None
            try:
                # requests may be added from here on, and ask for room
                self._made_cache()
            except BaseException:
                self._restore_attention()
                raise
        self._start_moving()
        super().start()

    def _restore_attention(self) -> None:
        for module in self._modules:
            module.give_back()
        give_back(self.model, self)

    def warmup(self) -> None:
        """Warms up, and restores the model's attention if that fails."""
        try:
            super().warmup()
        except BaseException:
            self._restore_attention()
            raise

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops the manager, and restores the model's attention once the last forward has run."""
        self._stopping = True
        super().stop(*args, **kwargs)
        if self.batch_processor is None:
            self._cache = None
        if not self.is_running():
            self._restore_attention()
        self._stop_moving()

    def _run_generation_loop(self, **kwargs: Any) -> None:
        if "use_inference_mode" in kwargs:
            # the cache outlives its caller's inference mode
            kwargs["use_inference_mode"] = False
        super()._run_generation_loop(**kwargs)
        if self._stopping:
            self._restore_attention()

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        boundaries: Iterable[int] = (),
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Adds a request. The record of a named one is also added to `records.brought` of the context.

        Args:
            boundaries: numbers of leading tokens that other requests may share. If prefixes are kept, the prompt is
                computed in parts that end there.

        Raises:
            ValueError: a boundary outside the prompt, or a sampling together with `return_logprobs`.
        """
        marks = check_marks(boundaries, len(input_ids))
        check_logprobs(logit_processor_kwargs.get("sampling"), self.continuous_batching_config.return_logprobs)
        if request_id is None and marks:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        if request_id is not None:
            record = self.records.open(request_id, len(input_ids), marks)
            if (found := brought.get()) is not None:
                found.append(record)
        options = (request_id, max_new_tokens, streaming, record_timestamps, eos_token_id)
        added = None
        try:
            added = super().add_request(input_ids, *options, **logit_processor_kwargs)
        finally:
            if added is None and request_id is not None:
                self.records.close(request_id, "error")
        return added

    def submit(
        self,
        input_ids: list[int],
        request_id: str,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        boundaries: Iterable[int] = (),
        **options: Any,
    ) -> RequestRecord:
        """Adds a request with its own sampling. Its outputs are routed as with `add_request`.

        Args:
            sampling: sampling of its tokens.
            max_new_tokens: maximum tokens per answer.
            boundaries: boundaries for `add_request`.
            **options: other fields of the engine's `RequestState`. `num_children` is the number of answers after the
                first. `engine_names.children` returns their names, and the prompt is computed once.

        Returns:
            The record of the first answer, which has the prompt's tokens.

        Raises:
            RuntimeError: the engine has stopped or failed.
            queue.Full: `max_queue_size` requests have not reached the engine yet.
            ValueError: a boundary outside the prompt, or a sampling together with `return_logprobs`.
        """
        marks = check_marks(boundaries, len(input_ids))
        check_logprobs(sampling, self.continuous_batching_config.return_logprobs)
        reason = self.background_thread_status.can_accept_new_requests()
        if reason is not None or self._cache is None:
            raise RuntimeError(reason or "the manager is stopped; start it before adding requests.")
        fields = {"max_new_tokens": max_new_tokens, "logit_processor_kwargs": {"sampling": sampling}, **options}
        state = RequestState(request_id, list(input_ids), **fields)
        records = [self.records.open(request_id, len(input_ids), marks)]
        records += [self.records.open(name, 0) for name in children(request_id, state.num_children)]
        try:
            self.input_queue.put_nowait(state)
        except queue.Full:
            for record in records:
                self.records.close(record.request_id, "error")
            raise
        if (found := brought.get()) is not None:
            found.extend(records)
        self._wake_up_loop.set()
        return records[0]

    def end_request(self, request_id: str, finish_reason: str) -> None:
        """Ends a request before the next forward and frees what it holds.

        Unlike `cancel_request`, it delivers an output: a finished one with the tokens so far.

        Args:
            finish_reason: finish reason for its record.
        """
        record = self.records.get(request_id)
        if record is not None:
            record.finish_reason, record.ending = finish_reason, True
            self.cancel_request(request_id)

    def _note_cancelled(self, state: RequestState) -> None:
        """Ends the answers of a cancelled request. Called by the engine's thread once it holds nothing."""
        for name in (state.request_id, *children(state.request_id, state.num_children)):
            record = self.records.get(name)
            if record is not None and record.ending:
                ended = state if name == state.request_id else RequestState(name, state.initial_tokens)
                ended.status = RequestStatus.FINISHED
                self.records.close(name, "cancelled")
                self.output_router.deliver(ended.to_generation_output())
            else:
                # nothing comes for its handler
                self.output_router.result_handlers.pop(name, None)
            self.records.close(name, "cancelled")

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        # a client that learns that its request failed may ask whether the engine did
        self.failure = error
        super()._handle_critical_error(error, batch_processor)

    def memory(self) -> ServingMemory | None:
        """Returns the memory at this moment, or None if nothing runs."""
        return None if (cache := self._cache) is None else cache.memory()

    def use_prefixes(self, prefixes: Any) -> None:
        """Lets requests begin with prefixes of earlier ones, and keeps their own at their end.

        Args:
            prefixes: `PrefixStore` for this model and configuration.

        Raises:
            ValueError: it is for another model or configuration, or the model keeps states.
        """
        if self._modules:
            raise ValueError(
                f"{type(self.model).__name__} has linear attention, and requests cannot begin with its states here; "
                "leave prefixes out."
            )
        config = rung_config(self._config)
        if prefixes.model is not self.model or prefixes.config != config:
            raise ValueError(
                "prefixes belong to a different model or configuration than this manager; make them with "
                f"PrefixStore(model, {config!r})."
            )
        self._stop_moving()
        self.prefixes = prefixes
        if self._cache is not None:
            self._cache.prefixes = prefixes
        if self.is_running():
            self._start_moving()

    def _start_moving(self) -> None:
        if self.prefixes is not None and not self._moving:
            self._moving = True
            self.prefixes.start()

    def _stop_moving(self) -> None:
        if self._moving:
            self._moving = False
            self.prefixes.stop()

    def statistics(self) -> ServingStatistics | None:
        """Returns the statistics, or None if nothing runs. It may be called by any thread."""
        cache, processor = self._cache, self.batch_processor
        if cache is None:
            return None
        tokens = (0, 0) if processor is None else (processor.prompt_tokens, processor.generated_tokens)
        return ServingStatistics(cache.memory(), self.waiting, *tokens, cache.preemptions)

    @property
    def waiting(self) -> int:
        """Number of requests without memory yet. Any thread may read it and `places`."""
        return self.input_queue.qsize() + self._held_up

    @property
    def places(self) -> int:
        """Number of requests that may still be admitted if there are pages; 0 while others wait for memory."""
        return 0 if (cache := self._cache) is None else cache.places_beside(self._held_up)

    @property
    def _held_up(self) -> int:
        return 0 if (processor := self.batch_processor) is None else len(processor.scheduler.waiting_requests)

    def check_request(self, prompt_tokens: int, max_new_tokens: int | None) -> int:
        """Calls `ContinuousCache.check_request` before anything is added. Also raises `ValueError` if nothing runs."""
        if (cache := self._cache) is None:
            raise ValueError("the manager is stopped; start it before adding requests.")
        return cache.check_request(prompt_tokens, max_new_tokens)

    def _ranks(self) -> Ranks:
        """Returns the ranks that share the model's heads, with the engine's process group for their exchange.

        Raises:
            UnsupportedModelError: the engine knows of other ranks than the model's weights do.
        """
        helper, parallel = self.distributed_helper, TensorParallel.of(self.model)
        if helper.tp_size != parallel.size:
            raise UnsupportedModelError(
                f"the weights of {type(self.model).__name__} are spread over {parallel.size} ranks but the engine "
                f"knows of {helper.tp_size}; load it with distributed_config=DistributedConfig(tp_size=...)."
            )
        return Ranks(replace(parallel, group=helper.cpu_comm_group))

    def _made_cache(self) -> ContinuousCache:
        if self._cache is None:
            self._cache = self._make_cache()
        return self._cache

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_cache(self) -> ContinuousCache:
        options = self.continuous_batching_config
        text_config = self.model.config.get_text_config(decoder=True)
        full, sliding = self._layers.full, self._layers.sliding
        budget = self._config.max_bytes
        if budget is None:
            budget = int(free_bytes(self._shape.device) * options.max_memory_percent)
        elif isinstance(budget, str):
            budget = budget_of(budget, self._shape.device)
        budget = self._shape.ranks.least(budget)
        windows = None if sliding is None else SlidingWindows(text_config, sliding, self._shape)
        states = LinearStates(self._states) if self._states else None
        others = [other for other in (windows, states) if other is not None]
        sizes = (options.max_requests_per_batch, self._longest, budget, others)
        harm = harm_for(self.model, self._config, len(full)) if lowers(self._config) else None
        slots = make_slots(self._config, self._shape, len(full), *sizes, harm)
        tokens = MAX_BATCH_TOKENS if options.max_batch_tokens is None else options.max_batch_tokens
        moments = moments_for(self.model, self._config)
        if moments is not None:
            slots.use_moments(moments)
        cache = ContinuousCache(slots, full, tokens, windows, states)
        cache.prefixes = self.prefixes
        return cache

    def _create_batch_processor(self) -> DiffKVBatchProcessor:
        if isinstance(self.batch_processor, DiffKVBatchProcessor):
            self.batch_processor.reset()
            return self.batch_processor
        cache = self._made_cache()
        options = self.continuous_batching_config
        initialization.update_cb_config_after_cache_creation(
            cb_config=options, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        self._use_prefix_sharing = False
        scheduler = scheduler_class(options.scheduler_type)(
            cache=cache, safety_margin=options.safety_margin, max_requests_per_batch=options.max_requests_per_batch
        )
        scheduler.records, scheduler.cancelled = self.records, self._note_cancelled
        scheduler.vocabulary = self.model.get_input_embeddings().num_embeddings
        processor = DiffKVBatchProcessor(
            cache=cache,
            config=self.model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=options,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        if captures_steps(self.model, cache, self._config.cuda_graphs and self._may_capture):
            processor.captured = CapturedSteps(self.model, cache)
        return processor


def make_manager(
    model: Any,
    generation_config: GenerationConfig,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> DiffKVBatchingManager:
    """Returns the manager of `init_continuous_batching` for `cache_implementation="diffkv"`, with its arguments."""
    fields = cache_fields(generation_config.cache_config)
    generation_config = copy.deepcopy(generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1
    options = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
    return DiffKVBatchingManager(model, fields, generation_config, options, workload_hints)


def _checked_options(given: ContinuousBatchingConfig, generation_config: GenerationConfig) -> ContinuousBatchingConfig:
    """Copies the user's engine options, without those that this cache does not use.

    Raises:
        ValueError: the options ask for an unsupported feature.
    """
    options = copy.deepcopy(given)
    for name, reason in NOT_THERE.items():
        value = getattr(generation_config if name == "compile_config" else options, name)
        asked = any(value) if isinstance(value, tuple) else bool(value)
        if asked or name == "cpu_offload_space" and value is None:  # None offloads as much as there is room for
            raise ValueError(
                f'{name}={value!r} cannot be combined with cache_implementation="diffkv": {reason}; leave it out.'
            )
    options.use_cuda_graph = options.use_async_batching = options.allow_block_sharing = False
    options.max_blocks_per_request = 0
    return options


def _longest(model: Any, hints: Any) -> int | None:
    """Returns the tokens of the longest request to plan for; None for as many as fit. A hint of 0 is ignored."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if hints is None or not (hints.max_prompt_length and hints.max_generated_length):
        return positions
    return hints.max_prompt_length + hints.max_generated_length
