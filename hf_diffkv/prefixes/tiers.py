"""Where prefixes are held: memory of a device or of the host, or a folder, and which give way when it is full."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor

from ..cache.devices import TensorParallel
from ..cache.io import load_snapshot, save_snapshot
from ..cache.snapshot import Snapshot

# fingerprint of model and configuration, tokens, hash of the tokens
ENTRY_NAME = re.compile(r"([0-9a-f]{16})-([0-9]+)-([0-9a-f]{32})")
PARTIAL = ".partial-"
LOCK = ".lock"
# a writer is done in seconds
LOCK_SECONDS = 30
# what a tensor's line in the header and everything else that is not data take at most
BYTES_PER_TENSOR = 256


class Rank(NamedTuple):
    """What decides who gives way: the smallest goes first.

    CaR's score counts the requests for a prefix: those announced as next, and those under way. Among equals the one
    that was used longest ago is the smallest.
    """

    score: int
    used: int


def choose_victims(ranks: dict[str, Rank], sizes: dict[str, int], rank: Rank, missing: float) -> list[str] | None:
    """Which of those held must go, smallest rank first, to free `missing` bytes for one of rank `rank`.

    None where those of a smaller rank do not hold that much: then the new one has no place here, and all may stay.
    """
    victims = []
    for name in sorted(sizes, key=ranks.__getitem__):
        if missing <= 0:
            break
        if ranks[name] >= rank:
            return None
        victims.append(name)
        missing -= sizes[name]
    return victims if missing <= 0 else None


class MemoryTier:
    """Snapshots in the memory of a device, or of the host.

    Args:
        name: of the tier.
        limit: bytes it may hold.
        to_host: move what is put here to the host, page-locked so that it comes back fast; else it stays where it is.
    """

    def __init__(self, name: str, limit: int, device: torch.device, to_host: bool = False) -> None:
        self.name, self.limit, self.device, self.to_host = name, limit, device, to_host
        self._held: dict[str, Snapshot] = {}

    def sizes(self) -> dict[str, int]:
        """Bytes held, by prefix."""
        return {name: self.size(name) for name in self._held}

    def size(self, name: str) -> int:
        """Bytes of a prefix that is here."""
        return self._held[name].bytes

    def used(self, name: str) -> int:
        """When it was used last; the store knows."""
        return 0

    def holds(self, name: str) -> bool:
        return name in self._held

    def cost(self, snapshot: Snapshot) -> int:
        """Bytes that `snapshot` will take here."""
        return snapshot.bytes

    def exclusive(self) -> AbstractContextManager:
        """Nobody else changes what is here."""
        return nullcontext()

    def moved(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot where this tier holds it; `put` leaves that as it is."""
        move = _to_host if self.to_host else self._here
        return Snapshot(snapshot.content, {key: move(tensor) for key, tensor in snapshot.tensors.items()})

    def put(self, name: str, snapshot: Snapshot, used: int) -> None:
        self._held[name] = self.moved(snapshot)

    def get(self, name: str) -> Snapshot:
        return self._held[name]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            del self._held[name]

    def _here(self, tensor: Tensor) -> Tensor:
        # what is on one of several devices of a model stays there
        return tensor if tensor.device.type == self.device.type else tensor.to(self.device)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available()).copy_(tensor)


class FolderTier:
    """Snapshots in a folder that several threads, processes and models may use at the same time.

    A subfolder is written or removed under another name, which a rename ends or begins; whoever changes something has
    the folder's lock, which the system gives back when a process is killed. So a subfolder is complete, and what
    has the other name while one holds the lock was left behind. `io` finds out about damage.

    Args:
        folder: made if missing.
        limit: bytes that all files of prefixes in it may have together, whoever wrote them.
    """

    name = "disk"

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        # each thread has its own
        self._lock = FileLock(folder / LOCK, timeout=LOCK_SECONDS)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Needed for `put` and `remove`. Raises `OSError` where the folder cannot be written, or the lock be had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            for path in self.folder.glob(PARTIAL + "*"):
                shutil.rmtree(path)
            yield

    def names(self) -> list[str]:
        """Names of all prefixes, of other models too."""
        try:
            return [name for name in os.listdir(self.folder) if ENTRY_NAME.fullmatch(name)]
        except FileNotFoundError:
            return []

    def sizes(self) -> dict[str, int]:
        """Bytes of their files, by prefix."""
        return {name: self.size(name) for name in self.names()}

    def size(self, name: str) -> int:
        """Bytes of the files of a prefix; 0 where it is gone."""
        try:
            return sum(path.stat().st_size for path in (self.folder / name).iterdir())
        except FileNotFoundError:
            return 0

    def used(self, name: str) -> int:
        """When a prefix was used last, in nanoseconds; 0 where it is gone."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except OSError:
            return 0

    def note_use(self, name: str, used: int) -> None:
        """Has other processes know that a prefix was used at `used`, if it is here."""
        try:
            os.utime(self.folder / name, ns=(used, used))
        except OSError:
            # at worst it goes earlier than it should
            return

    def holds(self, name: str) -> bool:
        return (self.folder / name).is_dir()

    def cost(self, snapshot: Snapshot) -> int:
        """Bytes that the files of `snapshot` will have at most."""
        description = len(json.dumps(snapshot.content, indent=2))
        return snapshot.bytes + description + BYTES_PER_TENSOR * (len(snapshot.tensors) + 4)

    def put(self, name: str, snapshot: Snapshot, used: int) -> None:
        """Raises `OSError` where the files cannot be written; nothing is left of them then."""
        partial = self.folder / (PARTIAL + name)
        try:
            save_snapshot(snapshot, partial, TensorParallel())
            os.utime(partial, ns=(used, used))
            os.rename(partial, self.folder / name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(str(error)) from error

    def get(self, name: str) -> Snapshot:
        """Raises as `load_snapshot`, and `OSError` where files cannot be read."""
        return load_snapshot(self.folder / name, TensorParallel())

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            partial = self.folder / (PARTIAL + name)
            try:
                os.rename(self.folder / name, partial)
            except FileNotFoundError:
                continue
            shutil.rmtree(partial)
