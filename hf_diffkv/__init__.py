"""DiffKV for Transformers: a KV cache that keeps important tokens precise, others coarse, and prunes the rest.

Importing registers the attention implementation "diffkv" and `cache_implementation="diffkv"`: at once where
Transformers' models have been loaded, else as soon as they are.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .config import DiffKVConfig, Precision
from .import_hook import register, unregister

if TYPE_CHECKING:
    from . import plot
    from .integration.cache import DiffKVCache
    from .integration.errors import HandOverError, UnsupportedModelError
    from .integration.usage import CacheInUseError
    from .prefixes import PrefixStore
    from .report import MemoryReport
    from .snapshot import CacheFileError
    from .store.read import IntegrityError

__version__ = "0.1.0"
__all__ = [
    "CacheFileError",
    "CacheInUseError",
    "DiffKVCache",
    "DiffKVConfig",
    "HandOverError",
    "IntegrityError",
    "MemoryReport",
    "Precision",
    "PrefixStore",
    "UnsupportedModelError",
    "plot",
    "register",
    "unregister",
]

# loaded on first use, since they need PyTorch and Transformers
_LAZY = {
    "CacheFileError": "snapshot",
    "CacheInUseError": "integration.usage",
    "DiffKVCache": "integration.cache",
    "HandOverError": "integration.errors",
    "IntegrityError": "store.read",
    "MemoryReport": "report",
    "PrefixStore": "prefixes",
    "UnsupportedModelError": "integration.errors",
}


def __getattr__(name: str) -> Any:
    if name == "plot":
        return importlib.import_module(".plot", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
