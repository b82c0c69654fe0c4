"""Pages that are promised are there for whom they are promised to, and for nobody else."""

from __future__ import annotations

import pytest
import torch
from hf_diffkv_serving.batching.reservations import Reservations, ReservedPool
from hf_diffkv_serving.batching.slots import Slots
from test_slots import LAYERS, LONGEST, PRECISIONS, SLOTS, adopt, configuration, make_slots

from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import PagePool
from hf_diffkv.store import Store


@pytest.fixture
def reservations() -> Reservations:
    """Over a pool of ten pages, of which the null page and two more exist."""
    pool = PagePool(64, torch.device("cpu"), max_pages=11)
    pool.ensure_free(2)
    return Reservations(pool)


def test_no_more_is_promised_than_there_can_be(reservations: Reservations) -> None:
    assert reservations.unreserved == 10
    assert reservations.reserve("a", 6) and reservations.reserve("b", 4)
    assert reservations.unreserved == 0
    assert not reservations.reserve("c", 1)
    # a new promise takes the place of the old one
    assert not reservations.reserve("b", 5) and reservations.promised("b") == 4
    assert reservations.reserve("b", 1) and reservations.reserve("c", 3)
    reservations.withdraw("a")
    reservations.withdraw("a")
    assert reservations.unreserved == 6
    reservations.clear()
    assert reservations.unreserved == 10


def test_what_is_promised_is_provided(reservations: Reservations) -> None:
    reservations.reserve("a", 3)
    reservations.reserve("b", 4)
    reservations.provide()
    assert reservations.pool.free_list.free == 7
    assert reservations.unreserved == 3


def test_an_owner_takes_its_own_and_no_more(reservations: Reservations) -> None:
    reservations.reserve("a", 3)
    reservations.reserve("b", 4)
    reservations.provide()
    pool = ReservedPool(reservations, "a")
    assert pool.page_bytes == 64 and pool.free_list is reservations.pool.free_list
    pool.ensure_free(2)
    _, taken = pool.free_list.take(torch.tensor([2]))
    with pytest.raises(MemoryError, match="2 pages are needed but only 1 are reserved"):
        pool.ensure_free(2)
    assert reservations.promised("a") == 1 and reservations.promised("b") == 4
    assert reservations.unreserved == 3
    pool.free_list.give(taken)
    reservations.look_again()
    assert reservations.unreserved == 5


def test_a_prompt_without_a_reservation_fails_alone() -> None:
    """It stores nothing, and the request that has one is not touched."""
    slots = make_slots(configuration(0.0, 0.0))
    good, bad = (adopt(slots) for _ in range(2))
    assert slots.reserve(good, 20)
    slots.begin([(good, 20), (bad, 30)])
    generator = torch.Generator().manual_seed(0)
    store = slots.parts[0].store
    for layer in range(LAYERS):
        query = torch.randn(1, 4, 50, 8, generator=generator)
        key, value = torch.randn(2, 1, 2, 50, 8, generator=generator)
        output = slots.attend(layer, query, key, value, softmax=Softmax(0.4))
        assert output[:, :, :20].any() and not output[:, :, 20:].any()
    failures = slots.take_failures()
    assert list(failures) == [bad] and isinstance(failures[bad], MemoryError)
    assert int(store.high_count[:, bad].sum()) == 0
    assert (store.high_count[:, good] == 16).all()
    slots.release(bad)
    slots.settle()
    assert slots.make_room(good, 1)


def test_a_request_beyond_the_longest_is_stopped_by_its_table() -> None:
    slots = make_slots(configuration(0.0, 0.0), max_tokens=16)
    slot = slots.adopt()
    assert slots.reserve(slot, LONGEST)
    slots.begin([(slot, LONGEST)])
    tensors = torch.randn(1, 4, LONGEST, 8), *torch.randn(2, 1, 2, LONGEST, 8)
    slots.attend(0, *tensors, softmax=Softmax(0.4))
    assert "longest length of requests" in str(slots.take_failures()[slot])


def test_idle_slots_hold_no_pages_and_are_given_again() -> None:
    slots = make_slots(configuration())
    given = [adopt(slots) for _ in range(SLOTS)]
    assert sorted(given) == list(range(SLOTS)) == list(range(slots.count)) and slots.idle == 0
    assert not slots.make_room(None, 1) and not slots.has_place
    slots.release(given[2])
    assert slots.adopt() == given[2]
    (part,) = slots.parts
    assert part.store.owned_pages().numel() == 0
    # not one page exists before there are tokens
    assert part.store.pool.capacity == 1


@pytest.mark.parametrize("max_bytes", [40_000, 60_000])
@pytest.mark.parametrize("precisions", PRECISIONS, ids=str)
def test_the_longest_request_surely_fits(max_bytes: int, precisions: tuple | None) -> None:
    """Stores every token at the high level, one by one and at once, up to the last one that is allowed."""
    config = configuration(0.0, 0.0, head_precisions=precisions)
    slots = make_slots(config, max_bytes, max_tokens=1000, slots=2)
    assert slots.longest < 1000
    fits, more = (
        [part.bounds.pages(n) < limit for part, limit in zip(slots.parts, slots.room.limits(1, n))]
        for n in (slots.longest, slots.longest + 20)
    )
    assert all(fits) and not all(more)
    slot, seen = slots.adopt(), 0
    generator = torch.Generator().manual_seed(0)
    while seen < slots.longest:
        tokens = min(slots.longest - seen, 1 if seen % 3 else 25)
        slots.settle()
        assert slots.make_room(slot, tokens) and slots.reserve(slot, tokens)
        slots.begin([(slot, tokens)])
        for layer in range(LAYERS):
            query = torch.randn(1, 4, tokens, 8, generator=generator)
            slots.attend(layer, query, *torch.randn(2, 1, 2, tokens, 8, generator=generator), softmax=Softmax(0.4))
        assert not slots.take_failures()
        assert slots.bytes <= max_bytes
        seen += tokens
    slots.settle()
    assert all((part.store.length[:, slot] == slots.longest).all() for part in slots.parts)


def test_bad_sizes() -> None:
    with pytest.raises(MemoryError, match="max_bytes=1000"):
        make_slots(configuration(), 1000)
    with pytest.raises(ValueError, match="alpha_low has 3 entries"):
        make_slots(configuration(alpha_low=(0.1, 0.2, 0.3)))
    with pytest.raises(ValueError, match="head_precisions has 1 entries"):
        make_slots(configuration(head_precisions=[["K8V4", "K4V2"]]))
    with pytest.raises(ValueError, match=r"head_precisions\[1\] has 1 entries"):
        make_slots(configuration(head_precisions=[None, ["K8V4"]]))


def test_thresholds_by_layer_and_head() -> None:
    slots: Slots = make_slots(configuration(alpha_high=((1.0, 2.0), (3.0, 4.0)), alpha_low=(0.5, 0.25)))
    store: Store = slots.parts[0].store
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:, None].expand_as(store.alpha_high)
    assert torch.equal(store.alpha_high, want)
    slot = slots.adopt()
    slots.reserve(slot, 9)
    slots.begin([(slot, 9)])
    slots.release(slot)
    assert torch.equal(store.alpha_high, want)
