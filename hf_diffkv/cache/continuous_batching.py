"""Lets Transformers' continuous batching use a compressed cache for `cache_implementation="diffkv"`.

The engine itself is a separate distribution, hf-diffkv-serving.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from transformers.generation.utils import GenerationMixin

from ..compat import BATCHING_BY_NAME, CACHE_NAMES, Wrapped, is_paused_here, kept_manager, passed
from ..extras import import_extra
from ..import_hook import NAME
from .diffkv_cache import DiffKVCache
from .errors import ModelInUseError
from .switching import needs_diffkv

_wrapped = Wrapped()
# managers by model
_made: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def register() -> None:
    """Wraps the method that makes managers and the one that runs a batch. A second call does nothing."""
    if not _wrapped.originals and BATCHING_BY_NAME.available():
        _wrapped.wrap(GenerationMixin, "init_continuous_batching", _wrap)
        _wrapped.wrap(GenerationMixin, "generate_batch", _wrap_batch)


def unregister() -> None:
    """Undoes `register`."""
    _wrapped.undo()


def check_no_manager(model: Any) -> None:
    """Raises `ModelInUseError` while continuous batching runs on `model`, unless this thread has paused it."""
    managers = [manager for manager in (kept_manager(model), *_made.get(model, ())) if manager is not None]
    for manager in managers:
        # a manager that replaces layers of the model does so even while it is paused
        lent = is_paused_here(manager) and not getattr(manager, "replaces_layers", False)
        if manager.is_running() and not lent:
            raise ModelInUseError(
                f"continuous batching is running on this {type(model).__name__}, and generate() would have to change "
                "its attention in the middle of requests; submit the prompt there (generate_batch, "
                "manager.add_request), call manager.stop() first, or load the model a second time."
            )


def check_no_call(model: Any) -> None:
    """Raises `ModelInUseError` while a `generate()` call with a `DiffKVCache` runs on `model`."""
    if needs_diffkv(model):
        raise ModelInUseError(
            f"a generate() call with a DiffKVCache is running on this {type(model).__name__}, and continuous batching "
            "would change its attention; start it after the call has returned, or load the model a second time."
        )


def _wrap(original: Callable) -> Callable:
    def init(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _wrapped.originals:
            return original(self, generation_config, *args, **kwargs)
        check_no_call(self)
        chosen = self.generation_config if generation_config is None else generation_config
        # a kept manager is reused, whatever the configuration says
        kept = kept_manager(self) is not None
        if kept or getattr(chosen, "cache_implementation", None) != NAME:
            manager = original(self, generation_config, *args, **kwargs)
        else:
            # imported here, as it relies on private names of Transformers that nothing else needs
            batching = import_extra("hf_diffkv_serving.batching.manager", "serve")
            manager = batching.make_manager(self, chosen, *args, **kwargs)
        _made.setdefault(self, weakref.WeakSet()).add(manager)
        return manager

    return init


def _wrap_batch(original: Callable) -> Callable:
    def generate_batch(self: Any, inputs: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _wrapped.originals:
            chosen = self.generation_config if generation_config is None else generation_config
            _check_keywords(chosen, kwargs)
        return original(self, inputs, generation_config, *args, **kwargs)

    return generate_batch


def _check_keywords(chosen: Any, keywords: dict[str, Any]) -> None:
    """Raises `ValueError` for keywords that ask for a `DiffKVCache`, all of which `generate_batch` silently drops."""
    if isinstance(passed(keywords), DiffKVCache):
        name = next(name for name in CACHE_NAMES if isinstance(keywords.get(name), DiffKVCache))
        raise ValueError(
            f"generate_batch() takes no cache, and would ignore {name}=; leave it out, and pass "
            "generation_config=GenerationConfig(cache_implementation='diffkv', ...)."
        )
    options = ("cache_implementation", "cache_config")
    unread = [name for name in options if keywords.get(name) not in (None, getattr(chosen, name, None))]
    if unread and NAME in (keywords.get(options[0]), getattr(chosen, options[0], None)):
        raise ValueError(
            f"generate_batch() ignores {' and '.join(unread)} as keywords; pass "
            "generation_config=GenerationConfig(cache_implementation='diffkv', cache_config=...)."
        )
