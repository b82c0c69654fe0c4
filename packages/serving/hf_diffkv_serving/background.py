"""Thread that moves the prefixes of a `PrefixStore` between tiers while requests are computed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from hf_diffkv.cache.snapshot import CacheFileError, Snapshot
from hf_diffkv.prefixes.hierarchy import Hierarchy, Requests
from hf_diffkv.prefixes.tiers import MemoryTier, Rank

# share of a memory tier above which prefixes move down early (CaR)
FULL = 0.9
_logger = logging.getLogger("hf_diffkv")


class Background:
    """Moves the least used prefixes down when memory is almost full, and the prefixes of waiting requests up.

    Files are read and written, and tensors copied, without the store's lock, so that other threads can continue. The
    folder's lock is never held while waiting for the store's lock.

    Args:
        tiers: tiers with the prefixes.
        requests: waiting and running requests.
        lock: the store's lock, which protects both.

    Attributes:
        offloaded, loaded_ahead: number of prefixes moved down and up so far.
        bytes_read: bytes of the prefixes moved up, by the tier they were read from.
    """

    def __init__(self, tiers: Hierarchy, requests: Requests, lock: Any) -> None:
        self._tiers, self._requests, self._lock = tiers, requests, lock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._users = 0
        # next work: names to move up, and whether some tier may be too full
        self._wanted: list[str] = []
        self._look = self._busy = False
        # whether a tier may be too full of prefixes that requests wait for
        self._held_back = False
        self._loading: str | None = None
        # prefixes that the thread tried to move up, once each, and prefixes that no lower tier takes
        self._tried: set[str] = set()
        self._stuck: set[str] = set()
        self.offloaded = self.loaded_ahead = 0
        self.bytes_read = {tier.name: 0 for tier in tiers.tiers}

    def start(self) -> None:
        """Starts the thread unless it is running. Raises `RuntimeError` if the system allows no more threads."""
        with self._changed:
            if self._thread is None:
                self._look = True
                thread = threading.Thread(target=self._run, name="hf_diffkv prefixes", daemon=True)
                # nobody may wait for a thread that could not start; one that could waits for this block to end
                thread.start()
                self._thread = thread
            self._users += 1

    def stop(self) -> None:
        """Ends the thread once there were as many `stop`s as `start`s, and waits for its end."""
        with self._changed:
            self._users = max(0, self._users - 1)
            if self._users or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._wanted.clear()
            self._changed.notify_all()
        # the store may be garbage-collected in this very thread
        if thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Ends the thread even if others still use it."""
        self._users = 0
        self.stop()

    def wake(self) -> None:
        """Notifies the thread that a prefix was added to a tier."""
        with self._changed:
            self._look = True
            self._stuck.clear()
            self._changed.notify_all()

    def want(self, names: Sequence[str]) -> None:
        """Asks the thread to move prefixes into the first tier if there is room, in place of those of the last call.

        Each is tried once as long as it stays among `names`.
        """
        with self._changed:
            self._tried.intersection_update(names)
            self._look, self._held_back = self._look or self._held_back, False
            if self._thread is not None:
                self._wanted = [name for name in dict.fromkeys(names) if name not in self._tried | {self._loading}]
                self._changed.notify_all()

    def is_loading(self, name: str) -> bool:
        """Returns whether a prefix is being moved up, or will be."""
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
                # the request is computed, or reads the prefix itself
                _logger.exception("a stored prefix could not be moved")

    def _offload(self) -> bool:
        """Moves one prefix down from the lowest memory tier that is too full, and returns whether there was one."""
        memory = self._tiers.memory
        return any(self._move_down(depth, int(FULL * memory[depth].limit)) for depth in reversed(range(len(memory))))

    def _move_down(self, depth: int, allowed: int, before: Rank | None = None) -> bool:
        """Moves the lowest-ranked prefix that no request waits for out of a tier that is too full.

        Args:
            depth: index of the tier.
            allowed: bytes that the tier may hold.
            before: rank that the prefix must be below, or None.

        Returns:
            Whether there was such a prefix. It stays if no lower tier takes it or if it was used meanwhile. Also False
            if the folder cannot be written, so that no others are tried.
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
                    # it may be moved next time
                    return True
                taken = self._put_if_free(lower, name, snapshot)
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
                    # other prefixes may find room now
                    self._stuck.clear()
        if not taken:
            with self._changed:
                self._stuck.add(name)
        return True

    def _is_unused(self, name: str, used: int) -> bool:
        """Returns whether no request has used or awaits a prefix since its use at `used`."""
        self._requests.settle()
        entry = self._tiers.entries.get(name)
        return entry is not None and entry.used == used and entry.score <= 0

    def _write(self, name: str, snapshot: Snapshot, used: int) -> bool:
        """Writes a prefix to the folder and returns whether it is there. Raises `OSError` if it cannot be written."""
        tiers, folder = self._tiers, self._tiers.folder
        if folder is None:
            return False
        cost = folder.cost(snapshot)
        # `entries` may not change before the store is locked
        with folder.exclusive():
            victims = [] if folder.holds(name) else tiers.victims(folder, tiers.rank(name), cost)
            if victims is not None and not folder.holds(name):
                folder.remove(victims)
                folder.put(name, snapshot, used)
                tiers.written[folder.name] += cost
        with self._lock:
            tiers.drop_lost(victims or [])
            if victims is not None and name not in tiers.entries:
                # it was removed from the store meanwhile
                tiers.remove([name])
        return victims is not None

    def _put_if_free(self, tier: MemoryTier, name: str, snapshot: Snapshot) -> bool:
        """Puts a prefix into a memory tier if no other must be evicted, and returns whether the tier holds it."""
        cost = tier.cost(snapshot)
        if not tier.holds(name):
            if sum(tier.sizes().values()) + cost > tier.limit:
                return False
            tier.put(name, snapshot, self._tiers.entries[name].used)
            self._tiers.written[tier.name] += cost
        return True

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
            tiers.note_fault("a stored prefix cannot be read, so its tokens are computed", error, _logger.warning)
            return
        while self._move_down(0, first.limit - first.cost(snapshot), rank):
            pass
        with self._lock:
            if name in tiers.entries and tier.holds(name) and self._put_if_free(first, name, snapshot):
                if tier is not tiers.folder:
                    tier.remove([name])
                # the tier may be too full once no request waits for it
                with self._changed:
                    self._look |= tiers.entries[name].score <= 0
                    self._held_back = True
                self.loaded_ahead += 1
                self.bytes_read[tier.name] += snapshot.bytes
