"""Names of Transformers' continuous batching engine that this package uses.

Importing this module raises `ImportError` if the release has a different engine (`compat.BATCHING`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

_resolving = threading.Lock()


@contextmanager
def knowing_layers() -> Iterator[None]:
    """Makes the engine skip layers that are neither full nor sliding attention while it resolves its options.

    The engine looks for layers that its own kernels cannot read. It refuses other kinds without asking its cache.
    """

    def known(config: Any) -> dict[str, list[int]]:
        kinds = enumerate(getattr(config, "layer_types", None) or ())
        found: dict[str, list[int]] = {}
        for index, kind in kinds:
            if kind in initialization.ATTN_TYPE_TO_ALLOCATOR:
                found.setdefault(kind, []).append(index)
        return found or original(config)

    with _resolving:
        original = initialization.group_layers_by_attn_type
        initialization.group_layers_by_attn_type = known
        try:
            yield
        finally:
            initialization.group_layers_by_attn_type = original


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
    "knowing_layers",
]

# separates a request's name from the number of a further answer to its prompt
CHILD = "__child#"


def children(request_id: str, count: int) -> list[str]:
    """Returns the engine's names of a prompt's answers after the first."""
    return [f"{request_id}{CHILD}{i}" for i in range(count)]
