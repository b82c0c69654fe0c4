"""DiffKV for Transformers: a KV cache that keeps important tokens precise, others coarse, and prunes the rest.

Importing registers the attention implementation "diffkv" and `cache_implementation="diffkv"`.
"""

from .config import DiffKVConfig, Precision
from .integration.cache import DiffKVCache
from .integration.errors import HandOverError, UnsupportedModelError
from .integration.registration import register, unregister
from .integration.usage import CacheInUseError
from .io import CacheFileError
from .report import MemoryReport, plot_levels
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
    "UnsupportedModelError",
    "plot_levels",
    "register",
    "unregister",
]

register()
