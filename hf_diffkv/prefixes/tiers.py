"""Tiers that hold prefixes, in device memory, host memory or a folder, and the choice of prefixes to evict."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from torch import Tensor

from ..cache.devices import TensorParallel
from ..cache.io import load_snapshot, save_snapshot
from ..cache.snapshot import Snapshot

# fingerprint of model and configuration, number of tokens, hash of the tokens
ENTRY_NAME = re.compile(r"([0-9a-f]{16})-([0-9]+)-([0-9a-f]{32})")
PARTIAL = ".partial-"
LOCK = ".lock"
# timeout of the lock; a writer needs only seconds
LOCK_SECONDS = 30
# upper bound per tensor on the header and everything else that is not data
BYTES_PER_TENSOR = 256


class Rank(NamedTuple):
    """Rank of a prefix. The lowest is evicted first, by score (`Requests`), then by least recent use."""

    score: int
    used: int


def choose_victims(ranks: dict[str, Rank], sizes: dict[str, int], rank: Rank, missing: float) -> list[str] | None:
    """Chooses the prefixes to evict, lowest rank first, to free `missing` bytes for a prefix of rank `rank`.

    Returns:
        Names to evict; None if prefixes of lower rank do not hold enough bytes, so that the new one may not enter.
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
    """Snapshots in the memory of a device or of the host.

    Args:
        limit: maximum number of bytes.
        device: device of the tier's snapshots, unless `to_host`.
        to_host: whether to move snapshots to page-locked host memory, from which they load quickly.
    """

    def __init__(self, name: str, limit: int, device: torch.device, to_host: bool = False) -> None:
        self.name, self.limit, self.device, self.to_host = name, limit, device, to_host
        self._held: dict[str, Snapshot] = {}

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each prefix by name."""
        return {name: self.size(name) for name in self._held}

    def size(self, name: str) -> int:
        """Returns the bytes of a prefix in this tier."""
        return self._held[name].bytes

    def holds(self, name: str) -> bool:
        return name in self._held

    def cost(self, snapshot: Snapshot) -> int:
        """Returns the bytes that `snapshot` will take here."""
        return snapshot.bytes

    def exclusive(self) -> AbstractContextManager:
        """Returns a context without a lock, as no other process can change this tier."""
        return nullcontext()

    def moved(self, snapshot: Snapshot) -> Snapshot:
        """Copies a snapshot to this tier's memory; `put` does not copy the result again."""
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
        # tensors on any of a model's several devices stay there
        return tensor if tensor.device.type == self.device.type else tensor.to(self.device)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available()).copy_(tensor)


class FolderTier:
    """Snapshots in a folder that several threads, processes and models may use at the same time.

    Each prefix is a subfolder. It is written under a partial name and then renamed, and renamed to a partial name
    before it is removed. Changes need the folder's lock, which the system releases when a process is killed. Subfolders
    are thus always complete, and partial names found by the lock's holder are leftovers. `io` detects damage.

    Args:
        folder: path of the folder, which is created if missing.
        limit: maximum size of all prefixes' files, including those of other processes.

    Raises:
        ValueError: the folder, or one above it, is a file.
    """

    name = "disk"

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"folder={str(folder)!r} is, or is in, a file; give a folder, which is created if missing."
            ) from error
        # each thread has its own lock
        self._lock = FileLock(folder / LOCK, timeout=LOCK_SECONDS)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Locks the folder for `put` and `remove`. Raises `OSError` if it is not writable or cannot be locked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            for path in self.folder.glob(PARTIAL + "*"):
                # other names do not belong to the store
                if ENTRY_NAME.fullmatch(path.name.removeprefix(PARTIAL)) and path.is_dir():
                    shutil.rmtree(path)
            yield

    def names(self) -> list[str]:
        """Returns the names of all prefixes, other models' included. Raises `OSError` if they cannot be listed."""
        try:
            with os.scandir(self.folder) as found:
                return [each.name for each in found if ENTRY_NAME.fullmatch(each.name) and each.is_dir()]
        except FileNotFoundError:
            return []

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each prefix's files by name."""
        return {name: self.size(name) for name in self.names()}

    def size(self, name: str) -> int:
        """Returns the bytes of a prefix's files; 0 if it is gone or cannot be read."""
        try:
            return sum(path.stat().st_size for path in (self.folder / name).iterdir())
        except OSError:
            return 0

    def used(self, name: str) -> int:
        """Returns the time of a prefix's last use, in nanoseconds; 0 if it is gone."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except OSError:
            return 0

    def note_use(self, name: str, used: int) -> None:
        """Records for all processes that a prefix was used at `used`, if it is here."""
        # at worst it is evicted too early
        with suppress(OSError):
            os.utime(self.folder / name, ns=(used, used))

    def holds(self, name: str) -> bool:
        # unlike Path.is_dir, this is False for unreadable paths
        return os.path.isdir(self.folder / name)

    def cost(self, snapshot: Snapshot) -> int:
        """Returns an upper bound on the bytes of the files of `snapshot`."""
        description = len(json.dumps(snapshot.content, indent=2))
        return snapshot.bytes + description + BYTES_PER_TENSOR * (len(snapshot.tensors) + 4)

    def put(self, name: str, snapshot: Snapshot, used: int) -> None:
        """Writes a prefix. Raises `OSError` if the files cannot be written, and then leaves none behind."""
        partial = self.folder / (PARTIAL + name)
        try:
            save_snapshot(snapshot, partial, TensorParallel())
            os.utime(partial, ns=(used, used))
            os.rename(partial, self.folder / name)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def get(self, name: str) -> Snapshot:
        """Reads a prefix. Raises the errors of `load_snapshot`, and `OSError` if files cannot be read."""
        return load_snapshot(self.folder / name, TensorParallel())

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            partial = self.folder / (PARTIAL + name)
            try:
                os.rename(self.folder / name, partial)
            except FileNotFoundError:
                continue
            shutil.rmtree(partial)
