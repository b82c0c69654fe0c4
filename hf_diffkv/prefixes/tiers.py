"""Where prefixes are held: memory of a device or of the host, and which of them give way when it is full."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.snapshot import Snapshot


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
