"""Counts of another rank's pages equal that rank's own counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hf_diffkv_serving.batching.page_bounds import PageBounds
from hf_diffkv_serving.batching.ranks import Ranks
from hf_diffkv_serving.batching.slots import Slots
from hypothesis.stateful import run_state_machine_as_test
from test_slots import LONGEST, SETTINGS, SlotMachine, configuration, make_slots


@dataclass(frozen=True)
class Mirror(Ranks):
    """Two ranks, of which the other one does all that this one does."""

    @property
    def alone(self) -> bool:
        return False

    def in_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def least(self, number: int) -> int:
        return number

    def all_of(self, mine: Sequence[bool]) -> list[bool]:
        return list(mine)

    def others(self, mine: Any) -> list[Any]:
        return [pickle.loads(pickle.dumps(mine))]

    def other_numbers(self, mine: np.ndarray) -> np.ndarray:
        return mine[None].copy()

    def all_failures(self, mine: dict[int, Exception]) -> dict[int, Exception]:
        return mine


def assert_mirrored(numbers: np.ndarray) -> None:
    here, there = np.split(numbers, 2)
    assert np.array_equal(here, there)


class MirroredMachine(SlotMachine):
    """Random traffic, with all decisions compared where they are taken: after `settle`, before the forward."""

    def make(self, max_bytes: int) -> Slots:
        slots = make_slots(self.config, max_bytes, ranks=Mirror())

        def watched(decide: Callable[..., Any]) -> Callable[..., Any]:
            def decided(slot: int, *args: Any) -> Any:
                for each in range(slots.count):
                    assert_mirrored(np.array([part.held(each) for part in slots.all_parts]))
                    for tokens in (1, 7, 50):
                        assert_mirrored(slots.need(each, tokens))
                found = decide(slot, *args)
                assert_mirrored(slots.unreserved)
                return found

            return decided

        slots.reserve, slots.fork = watched(slots.reserve), watched(slots.fork)
        return slots


def test_other_parts_count_alike() -> None:
    run_state_machine_as_test(MirroredMachine, settings=SETTINGS)


class Full(Mirror):
    """The other rank has no room for what it has not."""

    def all_of(self, mine: Sequence[bool]) -> list[bool]:
        return [False] * len(mine)


def test_room_elsewhere_counts() -> None:
    """A request waits where another rank has no room for it."""
    slots = make_slots(configuration(), ranks=Full())
    slot = slots.adopt()
    slots.settle()
    assert slots.make_room(slot, LONGEST)
    (there,) = slots.all_parts[len(slots.parts) :]
    numbers = slots.parts[0].numbers()
    numbers[1] = there.bounds.pages(LONGEST) - 1
    there.note(numbers)
    assert not slots.make_room(slot, LONGEST) and not slots.reserve(slot, LONGEST)
    assert slots.parts[0].promised(slot) == there.promised(slot) == 0
    assert slots.make_room(slot, LONGEST // 2) and slots.reserve(slot, LONGEST // 2)
    assert slots.parts[0].promised(slot) == there.promised(slot) == there.bounds.pages(LONGEST // 2)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (6, 0), (7, 6), (16, 7), (17, 10)])
def test_bounds_by_hand(tokens: int, pages: int) -> None:
    """Rows of 10, 10 and 5 tokens a page, where a second page may be begun, after six tokens in the window."""
    bounds = PageBounds(6, np.array([[10, 10, 5]]), True)
    assert bounds.pages(tokens) == pages


def test_one_process_asks_nobody() -> None:
    slots: Slots = make_slots(configuration())
    assert slots.all_parts == slots.parts
    assert Ranks().all_of([True, False]) == [True, False]
    assert Ranks().least(5) == 5 and Ranks().others(1) == [] and Ranks().all_failures({}) == {}
    assert Ranks().other_numbers(np.zeros((2, 3), dtype=np.int64)).shape == (0, 2, 3)
