"""The tiers of a store: moves prefixes between them, evicts them by rank, and counts the requests that use them."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Union

from ..cache.diffkv_cache import DiffKVCache
from ..cache.snapshot import Snapshot
from ..pages.reserve import NO_MEMORY
from .tiers import FolderTier, MemoryTier, Rank, choose_victims

PrefixTier = Union[MemoryTier, FolderTier]


@dataclass
class Entry:
    """Data on a prefix that does not depend on its tier.

    Attributes:
        used: time of the last use, in nanoseconds.
        score: number of announced and running requests for it (CaR).
        hits: number of lookups that it answered.
    """

    length: int
    used: int = 0
    score: int = 0
    hits: int = 0


class Hierarchy:
    """Prefixes by name in tiers, fastest tier first.

    At most one memory tier holds a given prefix; the folder keeps its copy of prefixes read from it. Prefixes that do
    not fit into a tier move to the next one.

    Args:
        folder: tier after the memory tiers, or None.
        fingerprint: beginning of the names in the folder that are usable; others only take up room.

    Attributes:
        disk_errors: number of files that could not be read, written or removed, or were damaged.
    """

    def __init__(self, memory: list[MemoryTier], folder: FolderTier | None, fingerprint: str) -> None:
        self.tiers: list[PrefixTier] = [*memory, *([] if folder is None else [folder])]
        self.memory, self.folder, self.fingerprint = memory, folder, fingerprint
        self.entries: dict[str, Entry] = {}
        self.written = {tier.name: 0 for tier in self.tiers}
        self.disk_errors = 0
        self._warned: set[tuple[str, int | None]] = set()
        self._clock = 0

    def open_folder(self) -> None:
        """Warns about unusable prefixes, and evicts prefixes if earlier processes had a larger limit."""
        folder = self.folder
        if folder is None:
            return
        others = sum(not name.startswith(self.fingerprint) for name in self._listed(folder))
        if others:
            warn(
                f"{folder.folder} holds {others} prefixes of another model, configuration or version; they are not "
                "used here, count towards folder_bytes, and are removed when their room is needed."
            )
        try:
            with folder.exclusive():
                folder.remove(self.victims(folder, Rank(1, 0), 0) or ())
        except OSError as error:
            self.note_fault("the prefix folder cannot be written, so prefixes can only be read", error)

    def refresh(self) -> None:
        """Notes prefixes that other processes have added to the folder or removed, and forgets what no tier holds.

        An interrupt or lack of device memory may have stopped a prefix on its way into a tier.
        """
        names: set[str] = set()
        if self.folder is not None:
            names = {name for name in self._listed(self.folder) if name.startswith(self.fingerprint)}
            for name in names - self.entries.keys():
                self.entries[name] = Entry(int(name.split("-")[1]), self.folder.used(name))
        self.drop_lost([name for name in self.entries if name not in names])

    def tier_of(self, name: str) -> PrefixTier | None:
        """Returns the fastest tier that holds a prefix, or None."""
        return next((tier for tier in self.tiers if tier.holds(name)), None)

    def rank(self, name: str) -> Rank:
        """Returns the eviction rank of a prefix, which may belong to another model."""
        entry, used = self.entries.get(name), 0 if self.folder is None else self.folder.used(name)
        return Rank(0, used) if entry is None else Rank(entry.score, max(entry.used, used))

    def by_rank(self) -> list[str]:
        """Returns the names of all prefixes, starting with the last to be evicted."""
        return sorted(self.entries, key=self.rank, reverse=True)

    def note_use(self, name: str) -> None:
        """Marks a prefix as the most recently used."""
        self._clock = max(time.time_ns(), self._clock + 1)
        self.entries[name].used = self._clock
        if self.folder is not None:
            self.folder.note_use(name, self._clock)

    def add(self, name: str, length: int, snapshot: Snapshot) -> None:
        """Adds a new prefix if some tier has room for it."""
        self.entries[name] = Entry(length)
        self.note_use(name)
        self._place(name, snapshot, 0)
        self.drop_lost([name])

    def promote(self, name: str, tier: PrefixTier, snapshot: Snapshot) -> None:
        """Moves a prefix that was read from `tier`, which is not the first, into the first tier that accepts it."""
        if tier is not self.folder:
            # frees its room, which it gets back if it cannot move up
            tier.remove([name])
        self._place(name, snapshot, 0)

    def save(self) -> None:
        """Copies the prefixes in memory into the folder, as far as there is room."""
        for name in self.by_rank():
            tier = self.tier_of(name)
            if tier is not None and tier is not self.folder:
                self._enter(len(self.tiers) - 1, name, tier.get(name))

    def sizes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes of prefixes by tier and name; none for a folder that cannot be listed (reported)."""
        found = {tier.name: tier.sizes() for tier in self.memory}
        if self.folder is not None:
            found[self.folder.name] = {name: self.folder.size(name) for name in self._listed(self.folder)}
        return found

    def victims(self, tier: PrefixTier, rank: Rank, cost: int) -> list[str] | None:
        """Chooses what to evict from a tier for a prefix of `cost` bytes and rank `rank`; None if it may not enter."""
        sizes = tier.sizes()
        ranks = {held: self.rank(held) for held in sizes}
        return choose_victims(ranks, sizes, rank, sum(sizes.values()) + cost - tier.limit)

    def note_fault(self, message: str, error: OSError, say: Callable[[str], None] | None = None) -> None:
        """Counts a file error, and reports each kind only once, as a full disk would keep repeating it."""
        self.disk_errors += 1
        if (message, error.errno) not in self._warned:
            self._warned.add((message, error.errno))
            (say or warn)(f"{message}: {error}")

    def drop_damaged(self, name: str, tier: PrefixTier, error: Exception, say: Callable[[str], None]) -> None:
        """Removes a damaged prefix from `tier`, and reports it unless another process removed it meanwhile."""
        if tier.holds(name):
            self.disk_errors += 1
            say(f"a stored prefix is damaged and is removed: {error}")
        self.remove([name], [tier])

    def drop_lost(self, names: list[str]) -> None:
        """Forgets the prefixes of `names` that no tier holds."""
        for name in names:
            if self.tier_of(name) is None:
                self.entries.pop(name, None)

    def remove(self, names: Iterable[str], tiers: list[PrefixTier] | None = None) -> None:
        """Removes prefixes from `tiers`, or from all tiers."""
        names = list(names)
        for tier in self.tiers if tiers is None else tiers:
            try:
                with tier.exclusive():
                    tier.remove([name for name in names if tier.holds(name)])
            except OSError as error:
                self.note_fault("prefixes cannot be removed", error)
        self.drop_lost(names)

    def _listed(self, folder: FolderTier) -> list[str]:
        """Returns the names in the folder; none, after a report, if it cannot be listed."""
        try:
            return folder.names()
        except OSError as error:
            self.note_fault("the prefix folder cannot be listed", error)
            return []

    def _place(self, name: str, snapshot: Snapshot, first: int) -> None:
        """Puts a prefix into the first tier, starting at `first`, that accepts it, if any."""
        for depth in range(first, len(self.tiers)):
            if self._enter(depth, name, snapshot):
                return

    def _enter(self, depth: int, name: str, snapshot: Snapshot) -> bool:
        """Puts a prefix into a tier, moving others down if needed, and returns whether the tier holds it."""
        tier = self.tiers[depth]
        if tier.holds(name):
            return True
        cost = tier.cost(snapshot)
        if cost > tier.limit:
            return False
        try:
            with tier.exclusive():
                if tier.holds(name):
                    # another process was faster
                    return True
                victims = self.victims(tier, self.rank(name), cost)
                if victims is None:
                    return False
                self._demote(depth, victims)
                tier.put(name, snapshot, self.entries[name].used)
        except OSError as error:
            self.note_fault("a prefix cannot be written", error)
            return False
        except NO_MEMORY:
            # the next tier may have some
            return False
        self.written[tier.name] += cost
        return True

    def _demote(self, depth: int, names: list[str]) -> None:
        tier = self.tiers[depth]
        if tier is self.folder:
            tier.remove(names)
        else:
            for name in names:
                snapshot = tier.get(name)
                tier.remove([name])
                self._place(name, snapshot, depth + 1)
        self.drop_lost(names)


def warn(message: str) -> None:
    """Warns about a problem with files; the store continues without them."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class Requests:
    """Waiting and running requests, and the scores they give to prefixes.

    CaR's score: a request adds 1 to the prefix it will use when it enters the look-ahead window, and 1 to the one it
    uses when it is dispatched. Both are taken back when it finishes.
    """

    def __init__(self) -> None:
        # name of each announced prompt, and the prefix whose score it raised
        self._window: list[tuple[str, Entry | None]] = []
        self._running: weakref.WeakKeyDictionary[DiffKVCache, weakref.finalize] = weakref.WeakKeyDictionary()
        # prefixes of finished requests; scores change later, as a cache may be garbage-collected at any time
        self._finished: deque[list[Entry | None]] = deque()

    def announce(self, window: list[tuple[str, Entry | None]]) -> None:
        """Replaces the look-ahead window."""
        # one at a time, so that the window matches the scores if this is interrupted
        while self._window:
            _add_to_score(self._window.pop()[1], -1)
        for one in window:
            self._window.append(one)
            _add_to_score(one[1], 1)

    def dispatch(self, prompt: str, entry: Entry | None, cache: DiffKVCache) -> None:
        """Notes that the request named `prompt` is running with `cache`, on the prefix `entry`."""
        _add_to_score(entry, 1)
        place = next((i for i, (announced, _) in enumerate(self._window) if announced == prompt), None)
        raised = [entry] if place is None else [entry, self._window.pop(place)[1]]
        finalizer = weakref.finalize(cache, self._finished.append, raised)
        finalizer.atexit = False
        self._running[cache] = finalizer

    def finish(self, cache: DiffKVCache) -> None:
        """Notes that the request of `cache`, if any, has ended."""
        finalizer = self._running.pop(cache, None)
        if finalizer is not None:
            finalizer()
        self.settle()

    def settle(self) -> None:
        """Takes back the scores of finished requests."""
        while self._finished:
            for entry in self._finished.popleft():
                _add_to_score(entry, -1)


def _add_to_score(entry: Entry | None, change: int) -> None:
    if entry is not None:
        entry.score += change
