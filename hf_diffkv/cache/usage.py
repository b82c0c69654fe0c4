"""Keeps each cache to one model and one `generate()` call at a time."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class CacheInUseError(RuntimeError):
    """A cache was given to a second model, or to a second `generate()` call while the first was still running."""


def in_use() -> CacheInUseError:
    """Returns the error for a second `generate()` call while the first still uses the cache."""
    return CacheInUseError(
        "another generate() call is using this cache right now; wait until it has returned. Concurrent calls need a "
        "cache each: to share a prefix, make the copies with copy.deepcopy(cache) before the first call."
    )


class Usage:
    """The model whose keys and values a cache holds, and the running `generate()` call.

    Attributes:
        drafts: whether an assistant, which is given the whole text every time, drafts with the cache.
    """

    def __init__(self) -> None:
        self.drafts = False
        self._model: weakref.ref | None = None
        self._run: weakref.ref | None = None
        self._thread: int | None = None
        self._lock = threading.Lock()

    @property
    def model(self) -> Any:
        """Model whose keys and values the cache holds; None if `generate()` has not been called with the cache."""
        return None if self._model is None else self._model()

    def claim(self, model: Any, run: Any) -> None:
        """Notes that `model` generates with the cache.

        Args:
            model: model of the call.
            run: object that lives exactly as long as the call.

        Raises:
            CacheInUseError: the cache holds another model's tokens, or another thread is generating with it.
        """
        with self._lock:
            held = self.model
            if held is not None and held is not model:
                raise CacheInUseError(
                    f"this cache holds keys and values of another {type(held).__name__}; use one DiffKVCache per "
                    "model, or call cache.reset() first."
                )
            if self._runs_elsewhere(run):
                raise in_use()
            self._model, self._run = weakref.ref(model), weakref.ref(run)
            self._thread = threading.get_ident()

    def release(self, run: Any, is_empty: bool) -> None:
        """Notes that the call `run` has ended, though an exception may keep it alive; an empty cache has no model."""
        with self._lock:
            if self._run is not None and self._run() is run:
                self._run = self._thread = None
                if is_empty:
                    self._model = None

    def check_idle(self) -> None:
        """Raises `CacheInUseError` while another thread generates with the cache."""
        with self._lock:
            if self._runs_elsewhere(None):
                raise CacheInUseError(
                    "another generate() call is using this cache right now, which forks would disturb; fork it before "
                    "that call begins or after it has returned."
                )

    def _runs_elsewhere(self, run: Any) -> bool:
        """Returns whether a call other than `run` uses the cache in another thread."""
        running = None if self._run is None else self._run()
        return running is not None and running is not run and self._thread != threading.get_ident()

    def clear(self) -> None:
        """Forgets the model, for an empty cache."""
        with self._lock:
            self._model = self._run = self._thread = None

    def __deepcopy__(self, memo: dict) -> Usage:
        twin, held = Usage(), self.model
        # a model that was copied along, before its cache
        twin._model = None if held is None else weakref.ref(memo.get(id(held), held))
        return twin

    def __reduce__(self) -> tuple:
        return Usage, ()
