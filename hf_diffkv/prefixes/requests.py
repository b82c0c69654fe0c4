"""Requests that wait and that are under way, and the scores they give to prefixes."""

from __future__ import annotations

import weakref
from collections import deque

from ..cache.diffkv_cache import DiffKVCache
from .hierarchy import Entry


class Requests:
    """CaR's score: a request adds 1 to the prefix it will use when it enters the look-ahead window, and 1 to the one
    it uses when it is dispatched; when it is finished, both are taken back.
    """

    def __init__(self) -> None:
        # hash of each announced prompt, and the prefix whose score it raised
        self._window: list[tuple[str, Entry | None]] = []
        self._running: weakref.WeakKeyDictionary[DiffKVCache, weakref.finalize] = weakref.WeakKeyDictionary()
        # of requests that ended; a cache may be dropped at any moment, so its scores are not changed there
        self._finished: deque[list[Entry]] = deque()

    def announce(self, window: list[tuple[str, Entry | None]]) -> None:
        """Replaces the window."""
        for entry in _entries(self._window):
            entry.score -= 1
        for entry in _entries(window):
            entry.score += 1
        self._window = window

    def dispatch(self, prompt: str, entry: Entry | None, cache: DiffKVCache) -> None:
        """Notes that the request with the hash `prompt` runs with `cache`, on the prefix `entry`."""
        raised = _entries([(prompt, entry)])
        for one in raised:
            one.score += 1
        place = next((i for i, (announced, _) in enumerate(self._window) if announced == prompt), None)
        raised += [] if place is None else _entries([self._window.pop(place)])
        finalizer = weakref.finalize(cache, self._finished.append, raised)
        finalizer.atexit = False
        self._running[cache] = finalizer

    def finish(self, cache: DiffKVCache) -> None:
        """Notes that the request of `cache` ended, if there was one."""
        finalizer = self._running.pop(cache, None)
        if finalizer is not None:
            finalizer()
        self.settle()

    def settle(self) -> None:
        """Takes back what ended requests had added."""
        while self._finished:
            for entry in self._finished.popleft():
                entry.score -= 1


def _entries(window: list[tuple[str, Entry | None]]) -> list[Entry]:
    return [entry for _, entry in window if entry is not None]
