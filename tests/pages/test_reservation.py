"""Memory that grows in place, and its fallback that copies."""

from __future__ import annotations

import copy
import os
import pickle
import sys

import pytest
import torch

from hf_diffkv.pages import reserve as module
from hf_diffkv.pages.reserve import MappedReservation, Reservation, reserve

CPU = torch.device("cpu")
KINDS = [Reservation, pytest.param(MappedReservation, marks=pytest.mark.skipif(
    sys.platform not in ("linux", "darwin"), reason="no memory mapping on this system"))]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_growth_keeps_what_was_written(kind: type[Reservation]) -> None:
    memory = kind(CPU)
    assert memory.committed == 0
    memory.commit(1000)
    memory.tensor[:1000] = torch.arange(1000).remainder(253).to(torch.uint8)
    expected = memory.tensor[:1000].clone()
    for size in (1001, 5000, 3_000_000):
        memory.commit(size)
        assert memory.committed == size
        assert memory.tensor.numel() >= size
        assert torch.equal(memory.tensor[:1000], expected)
        memory.tensor[size - 1] = 1


def test_copies_are_seldom_where_memory_is_taken_ahead() -> None:
    """A sixteenth more at a time, counted as slack; without `ahead` nothing more than is asked for."""
    memory = Reservation(CPU)
    copies = 0
    for size in range(1000, 4000):
        before = memory.tensor
        memory.commit(size, ahead=True)
        memory.tensor[size - 1] = size % 251
        copies += memory.tensor is not before
        assert memory.committed == size and 0 <= memory.slack <= size / 16
    # 1000 * (17 / 16)^23 is more than 4000
    assert copies <= 24
    assert memory.tensor[999:3999].tolist() == [size % 251 for size in range(1000, 4000)]
    memory.commit(5000)
    assert memory.slack == 0


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_given_back(kind: type[Reservation]) -> None:
    memory = kind(CPU)
    memory.commit(1 << 20)
    memory.tensor[: 1 << 20] = 7
    memory.shrink(1 << 21)
    assert memory.committed == 1 << 20
    memory.shrink(10_001)
    assert (memory.committed, memory.slack) == (10_001, 0) and (memory.tensor[:10_001] == 7).all()
    memory.commit(1 << 20)
    memory.tensor[10_001 : 1 << 20] = 9
    assert (memory.tensor[:10_001] == 7).all() and (memory.tensor[10_001 : 1 << 20] == 9).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_system_has_back_what_is_given_back() -> None:
    memory = MappedReservation(CPU)
    memory.commit(64 << 20)
    memory.tensor[: 64 << 20] = 1
    before = resident()
    memory.shrink(1 << 20)
    assert before - resident() > 60 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kind", KINDS)
def test_commit_never_shrinks(kind: type[Reservation]) -> None:
    memory = kind(CPU)
    memory.commit(100)
    address = memory.tensor.data_ptr()
    memory.commit(10)
    assert memory.committed == 100
    assert memory.tensor.data_ptr() == address


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_mapped_memory_grows_in_place_and_costs_what_is_touched() -> None:
    before = resident()
    memory = MappedReservation(CPU)
    address = memory.tensor.data_ptr()
    memory.commit(1 << 20)
    memory.commit(1 << 28)
    assert memory.tensor.data_ptr() == address
    memory.tensor[: 1 << 22] = 1
    assert (1 << 22) * 0.9 < resident() - before < 1 << 25


def test_more_than_the_machine_has_is_a_clear_error() -> None:
    memory = reserve(CPU)
    if not memory.grows_in_place:
        pytest.skip("no memory mapping on this system")
    memory.commit(100)
    with pytest.raises(MemoryError, match="more than this machine's memory"):
        memory.commit(memory.tensor.numel() + 1)
    assert memory.committed == 100


def test_without_address_space_it_falls_back_to_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError("no address space")

    monkeypatch.setattr(module.mmap, "mmap", refuse)
    memory = reserve(CPU)
    assert type(memory) is Reservation
    assert not memory.grows_in_place
    memory.commit(10)
    assert memory.tensor.numel() == 10


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_holds_the_committed_bytes_alone(kind: type[Reservation], duplicate) -> None:
    memory = kind(CPU)
    memory.commit(5000)
    memory.tensor[:5000] = torch.arange(5000).remainder(241).to(torch.uint8)
    expected = memory.tensor[:5000].clone()
    other = duplicate(memory)
    assert other.committed == 5000
    assert other.tensor.data_ptr() != memory.tensor.data_ptr()
    assert torch.equal(other.tensor[:5000], expected)
    other.tensor[:5000] = 0
    other.commit(9000)
    assert torch.equal(memory.tensor[:5000], expected)
    assert memory.committed == 5000


def test_a_pickle_is_as_large_as_what_is_held() -> None:
    memory = reserve(CPU)
    memory.commit(10_000)
    memory.tensor[:10_000] = 3
    assert len(pickle.dumps(memory)) < 20_000


def test_an_empty_reservation_can_be_copied() -> None:
    other = copy.deepcopy(reserve(CPU))
    assert other.committed == 0
    other.commit(10)
    assert other.tensor.numel() >= 10
