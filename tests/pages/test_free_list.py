"""The ring of free pages: order, wrap-around, and full and empty told apart."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from hf_diffkv.pages import FreeList


def free_list(count: int, first: int = 1) -> FreeList:
    pages = FreeList(torch.device("cpu"))
    pages.extend(first, count)
    return pages


def take(pages: FreeList, *need: int) -> list[int]:
    return pages.take(torch.tensor(need))[1].tolist()


def test_full_and_empty_differ() -> None:
    """Start and end of the ring coincide in both cases; only the explicit count tells them apart."""
    pages = free_list(4)
    assert pages.free == 4
    assert pages.ids().tolist() == [1, 2, 3, 4]
    assert take(pages, 4) == [1, 2, 3, 4]
    assert pages.free == 0
    assert pages.ids().tolist() == []
    pages.give(torch.tensor([3, 1, 4, 2]))
    assert pages.free == 4
    assert pages.ids().tolist() == [3, 1, 4, 2]


def test_an_empty_list_has_nothing() -> None:
    pages = FreeList(torch.device("cpu"))
    assert pages.free == 0
    assert pages.ids().tolist() == []
    assert take(pages, 0, 0) == []
    with pytest.raises(MemoryError, match="1 pages are needed but only 0 are free"):
        take(pages, 0, 1)


def test_every_row_gets_its_own_range_in_order() -> None:
    pages = free_list(9, first=10)
    rows, ids = pages.take(torch.tensor([2, 0, 3, 1]))
    assert rows.tolist() == [0, 0, 2, 2, 2, 3]
    assert ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert pages.ids().tolist() == [16, 17, 18]


def test_taking_too_much_takes_nothing() -> None:
    pages = free_list(5)
    take(pages, 2)
    pages.give(torch.tensor([2]))
    before = pages.ids().tolist(), pages.state.tolist(), pages.ring.tolist()
    with pytest.raises(MemoryError, match="5 pages are needed but only 4 are free"):
        take(pages, 1, 4)
    assert before == (pages.ids().tolist(), pages.state.tolist(), pages.ring.tolist())
    assert take(pages, 4) == [3, 4, 5, 2]
    with pytest.raises(MemoryError, match="only 0 are free"):
        take(pages, 1)


def test_take_at_most_one_gives_the_null_page_to_the_others() -> None:
    pages = free_list(5)
    take(pages, 3)
    pages.give(torch.tensor([2, 1, 3]))
    taken = pages.take_at_most_one(torch.tensor([False, True, True, False, True, True]))
    assert taken.tolist() == [0, 4, 5, 0, 2, 1]
    assert pages.ids().tolist() == [3]
    assert pages.take_at_most_one(torch.tensor([False, False])).tolist() == [0, 0]
    assert pages.ids().tolist() == [3]
    assert pages.take_at_most_one(torch.tensor([True])).tolist() == [3]
    assert pages.free == 0


def test_a_list_that_never_had_pages_gives_none_to_nobody() -> None:
    pages = FreeList(torch.device("cpu"))
    for _ in range(2):
        assert pages.take_at_most_one(torch.tensor([False, False])).tolist() == [0, 0]
        assert pages.state.tolist() == [0, 0, 0]
        pages.reserve(3)


def test_wrap_around_against_a_queue() -> None:
    """Hundreds of turns of a small ring behave as a first-in-first-out queue."""
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(0, high + 1, (), generator=generator))

    pages, queue, owned = free_list(7), deque(range(1, 8)), []
    was_full = was_empty = 0
    for turn in range(600):
        count = draw(len(queue))
        if turn % 2:
            expected = [queue.popleft() for _ in range(count)]
            split = draw(count)
            assert take(pages, split, count - split) == expected
            owned += expected
        else:
            need = torch.zeros(9, dtype=torch.bool)
            need[torch.randperm(9, generator=generator)[:count]] = True
            expected = [queue.popleft() for _ in range(count)]
            assert pages.take_at_most_one(need)[need].tolist() == expected
            owned += expected
        was_empty += not queue
        back = [owned.pop(draw(len(owned) - 1)) for _ in range(draw(len(owned)))]
        pages.give(torch.tensor(back, dtype=torch.int32))
        queue.extend(back)
        was_full += len(queue) == 7
        assert pages.free == len(queue)
        assert pages.ids().tolist() == list(queue)
    assert was_full > 20 and was_empty > 20


def test_extending_keeps_the_order_across_the_seam() -> None:
    pages = free_list(4)
    take(pages, 3)
    pages.give(torch.tensor([2, 3]))
    pages.extend(5, 2)
    assert pages.free == 5
    assert pages.ids().tolist() == [4, 2, 3, 5, 6]
    pages.give(torch.tensor([1]))
    assert take(pages, 6) == [4, 2, 3, 5, 6, 1]
    pages.extend(7, 1)
    assert take(pages, 1) == [7]
