"""What of Transformers' continuous batching engine is relied on.

All names of Transformers here are private to it. They were read in release 5.23; `engine.py` checks them.
"""

from __future__ import annotations

import transformers

from ..cache.private_names import PrivateName

OLDEST = (5, 23)
REMEDY = "generate() works with this release; please report it with the release's number"


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
        f"transformers {transformers.__version__} batches continuously in another way ({error}); {REMEDY}."
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

__all__ = [
    "EXPECTED",
    "FIELDS",
    "REMEDY",
    "SCHEDULER_MAPPING",
    "CachePool",
    "ContinuousBatchProcessor",
    "ContinuousBatchingManager",
    "PagedAttentionCache",
    "RequestState",
    "RequestStatus",
    "Scheduler",
    "SlidingAttentionCacheAllocator",
    "initialization",
]
