"""What of Transformers' continuous batching engine is relied on.

Importing this module raises `ImportError` where a release has another engine (`compat.BATCHING`).
"""

from __future__ import annotations

# ruff: noqa: E402
from ..compat import BATCHING

BATCHING.require()

from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool, SlidingAttentionCacheAllocator
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler

__all__ = [
    "CHILD",
    "SCHEDULER_MAPPING",
    "CachePool",
    "ContinuousBatchProcessor",
    "ContinuousBatchingLogitsProcessor",
    "ContinuousBatchingLogitsProcessorList",
    "ContinuousBatchingManager",
    "PagedAttentionCache",
    "RequestState",
    "RequestStatus",
    "Scheduler",
    "SlidingAttentionCacheAllocator",
    "children",
    "initialization",
]

# between the name of a request and the number of a further answer to its prompt
CHILD = "__child#"


def children(request_id: str, count: int) -> list[str]:
    """What the engine calls the answers to a prompt beside the first."""
    return [f"{request_id}{CHILD}{i}" for i in range(count)]
