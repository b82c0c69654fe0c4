"""KV cache for Transformers that stores keys and values in few bits, as many as each attention head needs.

It grew out of DiffKV (SOSP 2025) and also supports DiffKV's levels by significance and pruning.

Importing registers the attention implementation "diffkv" and `cache_implementation="diffkv"`: immediately if
Transformers' models have been imported, otherwise once they are.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .config import DiffKVConfig, Precision
from .import_hook import register, unregister
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import plot, ray, training
    from .cache.diffkv_cache import DiffKVCache
    from .cache.errors import CacheNotUsedError, HandOverError, ModelInUseError, UnsupportedModelError
    from .cache.report import MemoryReport
    from .cache.snapshot import CacheFileError
    from .cache.usage import CacheInUseError
    from .calibration.heads import measure_heads
    from .calibration.probe import probe_keys, without_fragile_level
    from .calibration.queries import keep_queries, measure_queries
    from .prefixes import PrefixStore
    from .store.read import IntegrityError

__all__ = [
    "CacheFileError",
    "CacheInUseError",
    "CacheNotUsedError",
    "DiffKVCache",
    "DiffKVConfig",
    "HandOverError",
    "IntegrityError",
    "MemoryReport",
    "ModelInUseError",
    "Precision",
    "PrefixStore",
    "UnsupportedModelError",
    "keep_queries",
    "measure_heads",
    "measure_queries",
    "plot",
    "probe_keys",
    "ray",
    "register",
    "training",
    "unregister",
    "without_fragile_level",
]

# imported on first use, as they need PyTorch and Transformers
_LAZY = {
    "CacheFileError": "cache.snapshot",
    "CacheInUseError": "cache.usage",
    "DiffKVCache": "cache.diffkv_cache",
    "IntegrityError": "store.read",
    "MemoryReport": "cache.report",
    "PrefixStore": "prefixes",
    "measure_heads": "calibration.heads",
    **dict.fromkeys(("CacheNotUsedError", "HandOverError", "ModelInUseError", "UnsupportedModelError"), "cache.errors"),
    **dict.fromkeys(("keep_queries", "measure_queries"), "calibration.queries"),
    **dict.fromkeys(("probe_keys", "without_fragile_level"), "calibration.probe"),
}


def __getattr__(name: str) -> Any:
    if name in ("plot", "ray", "training"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
