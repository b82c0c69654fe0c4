"""Exchange between the ranks of a tensor-parallel model, so that all make the same decisions.

Every rank schedules the same requests for itself, as in Transformers' engine. Ranks may hold different numbers of
pages, so each knows the numbers of all. They are exchanged over the engine's group for CPU tensors, so that nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_diffkv.cache.devices import ERROR_KINDS, TensorParallel, error_kind

from .page_bounds import PageBounds

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the heads of a model; alone by default.

    Attributes:
        parallel: ranks and their process group for CPU tensors.
    """

    parallel: TensorParallel = TensorParallel()

    @property
    def alone(self) -> bool:
        """Whether no other process has heads of the model."""
        return self.parallel.size == 1

    def in_step(self) -> AbstractContextManager[None]:
        """Returns `TensorParallel.in_step`: what fails on one rank fails on all."""
        return nullcontext() if self.alone else self.parallel.in_step(CPU)

    def least(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers."""
        if self.alone:
            return number
        shared = torch.tensor(number)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.parallel.group)
        return int(shared)

    def all_of(self, mine: Sequence[bool]) -> list[bool]:
        """Returns, for each answer, whether it is True on all ranks, which must have equally many."""
        if self.alone:
            return list(mine)
        shared = torch.tensor([int(answer) for answer in mine])
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.parallel.group)
        return [bool(answer) for answer in shared]

    def others(self, mine: Any) -> list[Any]:
        """Returns the other ranks' values of `mine`, which must be picklable, by rank."""
        if self.alone:
            return []
        found: list[Any] = [None] * self.parallel.size
        dist.all_gather_object(found, mine, group=self.parallel.group)
        return found[: self.parallel.rank] + found[self.parallel.rank + 1 :]

    def other_numbers(self, mine: np.ndarray) -> np.ndarray:
        """Returns `others` for int64 [...] of one shape on all ranks: int64 [ranks - 1, ...]."""
        if self.alone:
            return mine[None][:0]
        tensor = torch.from_numpy(np.ascontiguousarray(mine))
        found = [torch.empty_like(tensor) for _ in range(self.parallel.size)]
        dist.all_gather(found, tensor, group=self.parallel.group)
        return np.stack([each.numpy() for rank, each in enumerate(found) if rank != self.parallel.rank])

    def all_failures(self, mine: dict[int, Exception]) -> dict[int, Exception]:
        """Returns the errors on any rank by slot. A request that fails on one rank fails on all."""
        if self.alone or self.least(-len(mine)) == 0:
            return mine
        told = {slot: (self.parallel.rank, error_kind(error), str(error)) for slot, error in mine.items()}
        found = dict(mine)
        for theirs in self.others(told):
            for slot, (rank, kind, message) in theirs.items():
                place = f"on tensor-parallel rank {rank} of {self.parallel.size}"
                found.setdefault(slot, ERROR_KINDS[kind](f"{place}: {message}"))
        return found


class OtherPart:
    """Page counts of a part on another rank, as far as decisions need them.

    They equal that rank's own counts. Attributes and methods are those of `SlotPart`.

    Args:
        bounds: page bounds of the rank's heads.
    """

    # other ranks cannot tell which pages a request frees
    shares = False

    def __init__(self, bounds: PageBounds) -> None:
        self.bounds = bounds
        self.max_pages = self._free = 0
        self._held = self._step = np.zeros(0, dtype=np.int64)
        self._promised: dict[int, int] = {}

    def note(self, numbers: np.ndarray) -> None:
        """Takes over what `SlotPart.numbers` returned there."""
        self.max_pages, self._free = (int(number) for number in numbers[:2])
        self._held, self._step = np.split(numbers[2:].copy(), 2)

    @property
    def unreserved(self) -> int:
        return self._free - sum(self._promised.values())

    def promised(self, slot: int) -> int:
        return self._promised.get(slot, 0)

    def reserve(self, slot: int, pages: int) -> None:
        self._promised[slot] = pages

    def settle(self) -> None:
        self._promised.clear()

    def need(self, slot: int | None, seen: int, tokens: int) -> int:
        held, step = (0, 0) if slot is None else (self.held(slot), int(self._step[slot]))
        return self.bounds.more(seen, tokens, held, step)

    def held(self, slot: int) -> int:
        return int(self._held[slot])

    def copied(self, slot: int) -> int:
        return self.held(slot)

    def release(self, slot: int) -> None:
        self._free += self.held(slot)
        self._held[slot] = 0
        self._promised.pop(slot, None)

    def copy(self, slot: int, twin: int) -> None:
        self._free -= self.held(slot)
        self._held[twin], self._step[twin] = self._held[slot], self._step[slot]

    def move(self, slot: int, to: int) -> None:
        for numbers in (self._held, self._step):
            numbers[to], numbers[slot] = numbers[slot], 0
        if slot in self._promised:
            self._promised[to] = self._promised.pop(slot)


def other_parts(ranks: Ranks, mine: Sequence[PageBounds]) -> list[list[OtherPart]]:
    """Returns the parts of every other rank, given the bounds of those here. Each is empty until `OtherPart.note`."""
    return [[OtherPart(bounds) for bounds in theirs] for theirs in ranks.others(list(mine))]
