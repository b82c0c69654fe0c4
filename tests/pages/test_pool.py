"""The page pool: growth that moves nothing, and its limit."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_diffkv.pages import NULL_PAGE, PagePool

CPU = torch.device("cpu")


def test_the_null_page_is_never_given_out() -> None:
    pool = PagePool(256, CPU)
    assert (pool.capacity, pool.free_list.free) == (1, 0)
    pool.ensure_free(3)
    _, ids = pool.free_list.take(torch.tensor([3]))
    assert NULL_PAGE not in ids.tolist()
    assert sorted(ids.tolist()) == [1, 2, 3]


def test_growth_adds_only_what_is_missing() -> None:
    pool = PagePool(256, CPU)
    pool.ensure_free(5)
    assert (pool.capacity, pool.free_list.free) == (6, 5)
    pool.free_list.take(torch.tensor([2]))
    pool.ensure_free(3)
    assert pool.capacity == 6
    pool.ensure_free(7)
    assert (pool.capacity, pool.free_list.free) == (10, 7)


def test_growth_keeps_contents_and_addresses() -> None:
    pool = PagePool(512, CPU)
    pool.ensure_free(4)
    pool.pages[1:5] = torch.arange(4 * 512).remainder(251).to(torch.uint8).view(4, 512)
    before, address = pool.pages[1:5].clone(), pool.pages.data_ptr()
    for count in (10, 1000, 20000):
        pool.ensure_free(count)
        assert pool.pages.data_ptr() == address
        assert torch.equal(pool.pages[1:5], before)
        assert pool.pages.shape[0] >= pool.capacity
        assert pool.pages.shape[1] == 512
        pool.pages[pool.capacity - 1].fill_(7)
        assert (pool.pages[pool.capacity - 1] == 7).all()


def test_bytes_count_every_page_that_exists_and_the_free_list() -> None:
    pool = PagePool(1024, CPU)
    pool.ensure_free(100)
    free_list = pool.free_list
    tables = free_list.ring.numel() * 4 + free_list.state.numel() * 8
    assert pool.bytes == 101 * 1024 + tables
    assert pool._reservation.committed == 101 * 1024


@pytest.mark.parametrize("max_pages", [1, 2, 9])
def test_the_limit_is_reached_exactly(max_pages: int) -> None:
    pool = PagePool(256, CPU, max_pages=max_pages)
    pool.ensure_free(max_pages - 1)
    assert pool.capacity == max_pages
    taken = pool.free_list.take(torch.tensor([max_pages - 1]))[1]
    before = pool.capacity, pool.free_list.state.tolist(), pool._reservation.committed
    pool.ensure_free(0)
    with pytest.raises(MemoryError, match=f"1 more pages of 256 bytes but its limit of {max_pages} pages"):
        pool.ensure_free(1)
    assert before == (pool.capacity, pool.free_list.state.tolist(), pool._reservation.committed)
    if max_pages > 1:
        pool.free_list.give(taken[:1])
        pool.ensure_free(1)
        assert pool.free_list.free == 1


def test_a_failed_growth_changes_nothing() -> None:
    pool = PagePool(256, CPU, max_pages=6)
    pool.ensure_free(3)
    before = pool.capacity, pool.free_list.state.tolist(), pool.free_list.ids().tolist()
    with pytest.raises(MemoryError, match="3 more pages"):
        pool.ensure_free(6)
    assert before == (pool.capacity, pool.free_list.state.tolist(), pool.free_list.ids().tolist())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_copies_are_independent(duplicate) -> None:
    pool = PagePool(256, CPU, max_pages=50)
    pool.ensure_free(4)
    pool.free_list.take(torch.tensor([1]))
    pool.pages[:5] = torch.arange(5, dtype=torch.uint8)[:, None]
    other = duplicate(pool)
    assert (other.capacity, other.max_pages) == (5, 50)
    assert torch.equal(other.pages[:5], pool.pages[:5])
    assert other.free_list.ids().tolist() == [2, 3, 4]
    other.pages[:5] = 9
    other.ensure_free(30)
    assert torch.equal(pool.pages[:5], torch.arange(5, dtype=torch.uint8)[:, None].expand(5, 256))
    assert (pool.capacity, pool.free_list.free) == (5, 3)


def test_pages_that_go_leave_what_is_in_use() -> None:
    """Pages in use move to free ones below, and the table follows."""
    pool = PagePool(64, CPU)
    pool.ensure_free(20)
    _, ids = pool.free_list.take(torch.tensor([20]))
    pool.pages[ids] = torch.arange(20, dtype=torch.uint8)[:, None].expand(20, 64)
    kept = [18, 2, 11, 7, 19]
    table = torch.zeros(2, 4, dtype=torch.int32)
    table.view(-1)[[0, 1, 4, 5, 7]] = ids[kept].to(torch.int32)
    gone = [index for index in range(20) if index not in kept]
    pool.free_list.give(ids[gone])
    with pytest.raises(ValueError, match="21 pages cannot become 5"):
        pool.truncate(5, table)
    pool.truncate(30, table)
    assert pool.capacity == 21
    pool.truncate(8, table)
    assert pool.capacity == 8 and pool.free_list.free == 2
    used = table[table != NULL_PAGE]
    assert (used < 8).all() and sorted([*used.tolist(), *pool.free_list.ids().tolist()]) == list(range(1, 8))
    assert pool.pages[used.long(), 0].tolist() == kept
    assert pool.bytes == 8 * 64 + 4 * 7 + 8 * 3
    pool.ensure_free(4)
    assert pool.capacity == 10 and pool.pages[used.long(), 63].tolist() == kept


def test_shared_pages_that_go_move_once_for_all_their_owners() -> None:
    """Moves a page once if tables have it twice. A page with an owner outside the tables cannot move."""
    pool = PagePool(64, CPU)
    pool.ensure_free(9)
    _, ids = pool.free_list.take(torch.tensor([9]))
    pool.pages[ids] = torch.arange(9, dtype=torch.uint8)[:, None].expand(9, 64)
    first, second, third, alone = ids[[8, 1, 7, 6]].tolist()
    table = torch.tensor([[first, second, third, 0], [first, second, 0, alone], [first, 0, 0, 0]], dtype=torch.int32)
    pool.free_list.give(ids[[0, 2, 3, 4, 5]])
    pool.share(torch.tensor([first, second]))
    before = table.clone()
    with pytest.raises(ValueError, match="10 pages cannot become 5: .* owner elsewhere"):
        pool.truncate(5, table)
    assert torch.equal(table, before) and pool.capacity == 10 and pool.free_list.free == 5
    pool.share(torch.tensor([first]))
    pool.truncate(5, table)
    assert pool.capacity == 5 and pool.free_list.free == 0 and (table < 5).all()
    assert (table == NULL_PAGE).equal(before == NULL_PAGE)
    content = pool.pages[table[table != NULL_PAGE].long(), 63].tolist()
    assert content == [8, 1, 7, 8, 1, 6, 8]
    pages = table[0, :3].tolist() + [int(table[1, 3])]
    assert pool.owners(torch.tensor(pages)).tolist() == [3, 2, 1, 1]
    for row, free in zip(table, (1, 3, 4)):
        pool.release(row[row != NULL_PAGE])
        assert pool.free_list.free == free


def run_at(count: int, act: Callable[[], None]) -> Callable:
    """Returns a trace function that runs `act` once, at operation `count` of the pool's code."""
    code, left = PagePool.release.__code__, [count]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != code.co_filename:
            return None
        frame.f_trace_opcodes = True
        left[0] -= event == "opcode"
        if not left[0]:
            sys.settrace(None)
            act()
        return trace

    return trace


def drop(pool: PagePool, pages: Tensor, gone: list[Tensor]) -> None:
    """Releases pages as a fork does that goes."""
    pool.release(pages)
    gone.append(pages)


@pytest.mark.parametrize("change, left", [(PagePool.release, 1), (PagePool.share, 3)], ids=["release", "share"])
def test_owners_that_go_at_any_moment_are_counted(change: Callable, left: int) -> None:
    """Garbage collection may drop another fork while the pool counts owners."""
    before = sys.gettrace()
    for count in range(1, 300):
        pool, gone = PagePool(64, CPU), []
        pool.ensure_free(3)
        _, pages = pool.free_list.take(torch.tensor([3]))
        pool.share(pages)
        pool.share(pages)
        sys.settrace(run_at(count, partial(drop, pool, pages, gone)))
        try:
            change(pool, pages)
        finally:
            sys.settrace(before)
        if not gone:
            break
        assert pool.owners(pages).tolist() == [left] * 3 and pool.free_list.free == 0
    assert 10 < count < 299


def test_a_ring_that_was_made_ahead_stays_when_the_pool_shrinks() -> None:
    """A captured step reads it there."""
    pool = PagePool(64, torch.device("cpu"), max_pages=40)
    pool.ensure_free(20)
    pool.free_list.reserve(39)
    place = pool.free_list.ring.data_ptr()
    _, taken = pool.free_list.take(torch.tensor([6]))
    pool.free_list.give(taken[:3])
    table = taken[3:].to(torch.int32)
    pool.truncate(9, table)
    assert pool.free_list.ring.data_ptr() == place and pool.capacity == 9
    assert sorted([*table.tolist(), *pool.free_list.ids().tolist()]) == list(range(1, 9))
    pool.ensure_free(30)
    assert pool.free_list.ring.data_ptr() == place
    assert sorted([*table.tolist(), *pool.free_list.ids().tolist()]) == list(range(1, pool.capacity))
