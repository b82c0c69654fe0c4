"""The thread that moves prefixes while requests are computed, which is in the serving package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..extras import import_extra
from .hierarchy import Hierarchy, Requests


class NoThread:
    """Stands in for a store's thread before `PrefixStore.start`, and moves nothing."""

    loaded_ahead = offloaded = 0
    bytes_read: Mapping[str, int] = {}

    def stop(self) -> None: ...

    def flush(self) -> None: ...

    def wake(self) -> None: ...

    def want(self, names: Sequence[str]) -> None: ...

    def is_loading(self, name: str) -> bool:
        return False


def make_thread(tiers: Hierarchy, requests: Requests, lock: Any) -> Any:
    """Returns the thread of a store, not started. Raises `ImportError` if the serving package is not installed."""
    return import_extra("hf_diffkv_serving.background", "serve").Background(tiers, requests, lock)
