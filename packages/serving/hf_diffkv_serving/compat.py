"""Private names of Transformers' engine and server that this package uses; `hf_diffkv.compat` has the rest."""

from __future__ import annotations

from hf_diffkv.compat import Feature, names_of

_GENERATION_MIXIN = "transformers.generation.utils:GenerationMixin"
_CB = "transformers.generation.continuous_batching"
_API, _ALLOCATORS = f"{_CB}.continuous_api", f"{_CB}.cache_allocators"
_ALLOCATOR = f"{_ALLOCATORS}:SlidingAttentionCacheAllocator"
_PROCESSORS = f"{_CB}.cb_logits_processors"
_SERVING = "transformers.cli.serving"

BATCHING = Feature(
    'continuous batching does not work with cache_implementation="diffkv"; leave it out, or use generate()',
    (
        *names_of(
            "transformers.generation.utils:GenerationMixin.init_continuous_batching",
            "_cached_continuous_batching_manager",
        ),
        *names_of(
            f"{_API}:ContinuousBatchingManager",
            __init__="model generation_config continuous_batching_config workload_hints",
            switch_to_cb_friendly_attn="model auto_switch_to_flash",
            _create_batch_processor="",
            _run_generation_loop="...",
            _handle_critical_error="error batch_processor",
            warmup="",
            start="",
            add_request="input_ids request_id max_new_tokens streaming record_timestamps eos_token_id ...",
        ),
        *names_of(f"{_API}:OutputRouter", "result_handlers", deliver="output", fail_and_deliver="state error"),
        *names_of(f"{_API}:BackgroundThreadStatus", can_accept_new_requests=""),
        *names_of(
            f"{_API}:ContinuousBatchProcessor",
            __init__="cache config generation_config continuous_batching_config logit_processor input_queue "
            "cancel_queue output_router background_thread_status model_device model_dtype scheduler distributed_helper",
            _handle_request_error="error state",
            _generation_step="model",
            update_batch="",
            reset="",
        ),
        *names_of(
            f"{_PROCESSORS}:ContinuousBatchingLogitsProcessor",
            fill_defaults="int32_tensor",
            prepare_tensor_args="requests_with_new_token",
            __call__="scores tensor_arg",
        ),
        *names_of(
            f"{_PROCESSORS}:ContinuousBatchingLogitsProcessorList",
            *("logits_processor", "tensors_required", "do_processing"),
        ),
        *names_of(f"{_PROCESSORS}:ContinuousBatchingLogitsProcessorList._retrieve_processors_kwargs", "supported_keys"),
        *names_of(f"{_CB}.scheduler", "SCHEDULER_MAPPING"),
        *names_of(
            f"{_CB}.scheduler:Scheduler",
            __init__="cache safety_margin max_requests_per_batch",
            add_waiting_request="state",
            schedule_batch="token_budget cache_budget",
            finish_request="request_id",
            clear_cancelled_requests="",
            reset="",
            _get_waiting_candidates="",
            _schedule_request="state request_tokens token_budget request_ids_to_remove_from_waiting",
            _infer_request_tokens="state request_ids_to_remove_from_waiting",
        ),
        *names_of(
            f"{_ALLOCATORS}:CachePool",
            __init__="num_sectors num_allocators num_reserved_sectors",
            free_blocks="index block_ids",
        ),
        *names_of(
            _ALLOCATOR,
            __init__="index config num_key_value_heads cache_dtype page_size layer_indices allow_block_sharing",
            register_cache_tensor="bytes_per_sector non_trash_bytes cache_tensor pool",
            allocate_cache_to_request="request_id past_length query_length",
            get_read_indices="request_id past_length query_length",
            get_write_indices="request_id past_length query_length",
            get_seqlen_k="past_length query_length",
            free_blocks="request_id no_cache",
            fork_blocks="source_request_id dest_request_id past_length",
            copy_blocks="source_block_ids dest_block_ids",
            update="key_states value_states layer_idx read_index write_index",
        ),
        *names_of(
            f"{_CB}.initialization", update_cb_config_after_cache_creation="cb_config num_blocks max_batch_tokens"
        ),
        *names_of(f"{_CB}.initialization", "ATTN_TYPE_TO_ALLOCATOR", group_layers_by_attn_type="config"),
        *names_of(f"{_CB}.cache", "PagedAttentionCache"),
        *names_of(f"{_CB}.distributed:DistributedHelper", "tp_size", "cpu_comm_group"),
        *names_of(f"{_CB}.requests", "RequestStatus"),
        *names_of(
            f"{_CB}.requests:RequestState",
            *("request_id", "initial_tokens", "max_new_tokens", "num_children", "_new_tokens_limit", "_status"),
            *("generated_tokens", "position_offset", "_eos_token_ids"),
            *("logit_processor_kwargs", "logprobs", "_true_initial_tokens"),
            to_generation_output="",
            create_equivalent_initial_request="",
        ),
    ),
    since=(5, 23),
)
SERVER = Feature(
    "`hf-diffkv serve` does not work; use generate_batch",
    names_of(
        f"{_SERVING}.utils",
        *("ReasoningText", "ToolCall"),
        build_response_parser="processor model input_ids tools",
        response_events_to_chunks="events",
    ),
    since=(5, 23),
)
