"""Has Transformers' continuous batching use a compressed cache where `cache_implementation="diffkv"` says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.generation.utils import GenerationMixin

from ..import_hook import NAME

METHOD = "init_continuous_batching"
_original: Callable | None = None


def register() -> None:
    """Wraps what makes managers; a second call does nothing."""
    global _original
    owner = _owner()
    if _original is None and owner is not None:
        _original = getattr(owner, METHOD)
        setattr(owner, METHOD, _wrap(_original))


def unregister() -> None:
    """Undoes `register`."""
    global _original
    # where another library wrapped the method since, our part of the chain merely passes calls on
    if _original is not None and getattr(getattr(_owner(), METHOD), "_diffkv", False):
        setattr(_owner(), METHOD, _original)
    _original = None


def _owner() -> type | None:
    """The class that offers continuous batching to models; None where there is none."""
    return next((cls for cls in GenerationMixin.__mro__ if METHOD in vars(cls)), None)


def _wrap(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = self.generation_config if generation_config is None else generation_config
        # a manager that was kept is used again, whatever is asked for
        kept = getattr(self, "_cached_continuous_batching_manager", None) is not None
        if _original is None or kept or getattr(chosen, "cache_implementation", None) != NAME:
            return original(self, generation_config, *args, **kwargs)
        # what it relies on is private to Transformers, and need not be there for anything else
        from .manager import make_manager

        return make_manager(self, chosen, *args, **kwargs)

    init._diffkv = True
    return init
