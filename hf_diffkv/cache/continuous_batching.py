"""Has Transformers' continuous batching use a compressed cache where `cache_implementation="diffkv"` says so.

The engine that does is a distribution of its own, hf-diffkv-serving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.utils import GenerationMixin

from ..compat import BATCHING_BY_NAME, Wrapped, kept_manager
from ..extras import beside
from ..import_hook import NAME

_wrapped = Wrapped()


def register() -> None:
    """Wraps what makes managers; a second call does nothing."""
    if not _wrapped.originals and BATCHING_BY_NAME.available():
        _wrapped.wrap(GenerationMixin, "init_continuous_batching", _wrap)


def unregister() -> None:
    """Undoes `register`."""
    _wrapped.undo()


def _wrap(original: Callable) -> Callable:
    def init(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = self.generation_config if generation_config is None else generation_config
        # a manager that was kept is used again, whatever is asked for
        kept = kept_manager(self) is not None
        if not _wrapped.originals or kept or getattr(chosen, "cache_implementation", None) != NAME:
            return original(self, generation_config, *args, **kwargs)
        # what it relies on is private to Transformers, and need not be there for anything else
        manager = beside("hf_diffkv_serving.batching.manager", "serve")
        return manager.make_manager(self, chosen, *args, **kwargs)

    return init
