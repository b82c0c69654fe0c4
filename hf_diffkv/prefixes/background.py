"""A thread that moves prefixes between tiers while requests are computed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from ..cache.snapshot import CacheFileError, Snapshot
from .hierarchy import Hierarchy, Requests
from .tiers import MemoryTier, Rank

# share of a tier of memory above which prefixes move down before they have to (CaR)
FULL = 0.9
_logger = logging.getLogger("hf_diffkv")


class Background:
    """Moves down what is used least where memory is almost full, and up what requests that wait will use.

    Files are read and written, and tensors copied, without the lock of the store, so that others may go on. The lock of
    the folder is never held while that of the store is waited for.

    Args:
        tiers: where prefixes are.
        requests: that wait and are under way.
        lock: of the store, held by whoever changes either.

    Attributes:
        offloaded, loaded_ahead: prefixes moved down and up so far. bytes_read: what the latter took out of each tier.
    """

    def __init__(self, tiers: Hierarchy, requests: Requests, lock: Any) -> None:
        self._tiers, self._requests, self._lock = tiers, requests, lock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._users = 0
        # what is next: names to be brought up, and whether some tier may be too full
        self._wanted: list[str] = []
        self._look = self._busy = False
        # whether a tier may be too full of what requests wait for
        self._held_back = False
        self._loading: str | None = None
        # brought up or not, once is enough; and what no lower tier takes
        self._tried: set[str] = set()
        self._stuck: set[str] = set()
        self.offloaded = self.loaded_ahead = 0
        self.bytes_read = {tier.name: 0 for tier in tiers.tiers}

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        with self._changed:
            self._users += 1
            if self._thread is None:
                self._look = True
                self._thread = threading.Thread(target=self._run, name="hf_diffkv prefixes", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread once every `start` has been answered by a `stop`; returns when it has ended."""
        with self._changed:
            self._users = max(0, self._users - 1)
            if self._users or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._wanted.clear()
            self._changed.notify_all()
        # a store may be collected by its own thread
        if thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Ends the thread, whoever uses it."""
        self._users = 0
        self.stop()

    def wake(self) -> None:
        """Says that something came into a tier."""
        with self._changed:
            self._look = True
            self._stuck.clear()
            self._changed.notify_all()

    def want(self, names: Sequence[str]) -> None:
        """Has prefixes brought into the first tier, where they find room, in place of those that were wanted before.

        Each is tried once, until it is not among `names` any more.
        """
        with self._changed:
            self._tried.intersection_update(names)
            self._look, self._held_back = self._look or self._held_back, False
            if self._thread is not None:
                self._wanted = [name for name in dict.fromkeys(names) if name not in self._tried | {self._loading}]
                self._changed.notify_all()

    def is_loading(self, name: str) -> bool:
        """Whether a prefix is being brought up, or is going to be."""
        with self._changed:
            return name == self._loading or name in self._wanted

    def flush(self) -> None:
        """Waits until there is nothing to move."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or not (self._busy or self._wanted or self._look))

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                self._busy, self._loading = False, None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._thread is not thread or self._wanted or self._look)
                if self._thread is not thread:
                    return
                self._busy = True
                if self._wanted:
                    self._loading = self._wanted.pop(0)
                    self._tried.add(self._loading)
                else:
                    self._look = False
            try:
                if self._loading is not None:
                    self._bring_up(self._loading)
                elif self._offload():
                    with self._changed:
                        self._look = True
            except Exception:
                # the request will be computed, or read its prefix itself
                _logger.exception("a stored prefix could not be moved")

    def _offload(self) -> bool:
        """Moves one prefix down from the lowest tier of memory that is too full; whether there was one to move."""
        memory = self._tiers.memory
        return any(self._move_down(depth, int(FULL * memory[depth].limit)) for depth in reversed(range(len(memory))))

    def _move_down(self, depth: int, allowed: int, before: Rank | None = None) -> bool:
        """Moves the prefix of the smallest rank that no request waits for out of a tier that holds too much.

        Args:
            allowed: bytes that the tier may hold.
            before: only what has a smaller rank than this.

        Returns:
            Whether there was one; it stays where no tier below takes it, or where it was used meanwhile. False also
            where the folder cannot be written, so that not all are tried.
        """
        tier, tiers = self._tiers.memory[depth], self._tiers
        with self._lock:
            self._requests.settle()
            sizes = tier.sizes()
            ranks = {name: tiers.rank(name) for name in sizes.keys() - self._stuck if tiers.entries[name].score <= 0}
            name = min(ranks, key=ranks.__getitem__, default=None)
            if sum(sizes.values()) <= allowed or name is not None and before is not None and ranks[name] >= before:
                return False
            if name is None:
                self._held_back = True
                return False
            snapshot, used = tier.get(name), tiers.entries[name].used
        lower = next((t for t in tiers.tiers[depth + 1 :] if t.cost(snapshot) <= t.limit), None)
        taken = False
        if isinstance(lower, MemoryTier):
            snapshot = lower.moved(snapshot)
            with self._lock:
                if not (self._is_unused(name, used) and tier.holds(name)):
                    # it may go the next time
                    return True
                taken = tiers.put_if_free(lower, name, snapshot)
        elif lower is not None:
            try:
                taken = self._write(name, snapshot, used)
            except OSError as error:
                self._tiers.note_fault("a prefix cannot be written", error, _logger.warning)
                return False
        with self._lock:
            if taken and self._is_unused(name, used) and tier.holds(name):
                tier.remove([name])
                self.offloaded += 1
                with self._changed:
                    # what found no room there may find it now
                    self._stuck.clear()
        if not taken:
            with self._changed:
                self._stuck.add(name)
        return True

    def _is_unused(self, name: str, used: int) -> bool:
        """Whether nobody has asked for a prefix since it was used at `used`."""
        self._requests.settle()
        entry = self._tiers.entries.get(name)
        return entry is not None and entry.used == used and entry.score <= 0

    def _write(self, name: str, snapshot: Snapshot, used: int) -> bool:
        """Whether the folder holds a prefix now. Raises `OSError` where it cannot be written."""
        lost = self._tiers.write(name, snapshot, used)
        with self._lock:
            self._tiers.drop_lost(lost or [])
            if lost is not None and name not in self._tiers.entries:
                # it was removed for good meanwhile
                self._tiers.remove([name])
        return lost is not None

    def _bring_up(self, name: str) -> None:
        tiers, first = self._tiers, self._tiers.memory[0]
        with self._lock:
            tier = tiers.tier_of(name)
            if tier is None or tier is first or tier.size(name) > first.limit:
                return
            rank = tiers.rank(name)
            snapshot = None if tier is tiers.folder else tier.get(name)
        try:
            snapshot = first.moved(tier.get(name) if snapshot is None else snapshot)
        except (CacheFileError, FileNotFoundError) as error:
            with self._lock:
                tiers.drop_damaged(name, tier, error, _logger.warning)
            return
        except OSError as error:
            tiers.note_fault("a stored prefix cannot be read, its tokens are computed", error, _logger.warning)
            return
        while self._move_down(0, first.limit - first.cost(snapshot), rank):
            pass
        with self._lock:
            if name in tiers.entries and tier.holds(name) and tiers.put_if_free(first, name, snapshot):
                if tier is not tiers.folder:
                    tier.remove([name])
                # it is one too many, maybe, once nobody waits for it
                with self._changed:
                    self._look |= tiers.entries[name].score <= 0
                    self._held_back = True
                self.loaded_ahead += 1
                self.bytes_read[tier.name] += snapshot.bytes
