"""Slots become more and fewer, for longer and shorter requests, and what requests hold stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batching import check_empty, check_slots
from hf_diffkv_serving.batching import growing
from hf_diffkv_serving.batching.growing import GrowingTensor
from hf_diffkv_serving.batching.slots import Slots
from test_slots import BUDGETS, Request, adopt, alone_stores, assert_same_request, configuration, make_slots, run

from hf_diffkv.pages.reserve import Reservation, reserve

CONFIG = configuration(rotate=True, center=True, sinks=2)


@pytest.mark.parametrize("kind", [Reservation, reserve])
def test_a_tensor_changes_its_size_where_it_stands(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "reserve", kind)
    held = torch.arange(3 * 2 * 4).view(3, 2, 4)
    tensor = GrowingTensor(held)
    for shape in ((3, 5, 4), (3, 7, 9), (3, 2, 20), (3, 1, 3), (3, 4, 4)):
        old, expected = tensor.tensor.clone(), torch.zeros(shape, dtype=torch.int64)
        slots, width = min(shape[1], old.shape[1]), min(shape[2], old.shape[2])
        expected[:, :slots, :width] = old[:, :slots, :width]

        def place(layer: int, fresh: torch.Tensor, kept: torch.Tensor, slots: int = slots, width: int = width) -> None:
            fresh[:slots, :width] = kept[:slots, :width]

        tensor.resize(shape, place)
        assert torch.equal(tensor.tensor, expected)
        assert tensor.slack == 0 and tensor._memory.committed == 8 * math.prod(shape)


def arrive(slots: Slots) -> Request:
    slot = adopt(slots)
    return Request(slot, torch.Generator().manual_seed(slot), alone_stores(CONFIG))


def test_short_requests_get_slots_and_a_long_one_gets_pages() -> None:
    """Takes both in turns from the same bytes. A request that goes on meanwhile equals one that is alone."""
    slots = make_slots(CONFIG, BUDGETS["tight"] * 2, slots=40, max_tokens=1000)
    assert slots.count == 1 and slots.longest < 1000
    stays, found = arrive(slots), []
    run(slots, [stays], [9])
    for _ in range(2):
        short = []
        slots.settle()
        while slots.has_place:
            short.append(arrive(slots))
            run(slots, [short[-1]], [3])
            slots.settle()
        assert not slots.make_room(None, 0) and slots.count == len(short) + 1
        run(slots, [stays, *short], [1] * (len(short) + 1))
        found.append(len(short))
        assert_same_request(slots, stays)
        for request in short:
            slots.release(request.slot)
        slots.settle()
        long = arrive(slots)
        while slots.make_room(long.slot, 20):
            run(slots, [long, stays], [20, 1])
            slots.settle()
        assert long.tokens > 100 and slots.count == 2 and slots.room.tokens >= long.tokens
        assert_same_request(slots, long)
        assert_same_request(slots, stays)
        check_slots(slots)
        slots.release(long.slot)
    # as many as the first time, once the long one has gone
    assert found[0] == found[1] > 8
    slots.release(stays.slot)
    check_empty(slots)


def test_the_last_slots_go_first() -> None:
    """And requests in them move to the front."""
    slots = make_slots(CONFIG, BUDGETS["tight"] * 2, slots=40, max_tokens=1000)
    requests = [arrive(slots) for _ in range(6)]
    run(slots, requests, [30, 3, 12, 9, 20, 15])
    for request in requests[:4]:
        slots.release(request.slot)
    slots.settle()
    last = requests[4:]
    assert [request.slot for request in last] == [4, 5]
    while slots.count > 2:
        run(slots, last, [10, 1])
    assert sorted(request.slot for request in last) == [0, 1]
    for request in last:
        assert_same_request(slots, request)
    run(slots, last, [1, 1])
    for request in last:
        assert_same_request(slots, request)
        slots.release(request.slot)
    check_empty(slots)


def test_memory_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = make_slots(CONFIG, slots=4)
    request = arrive(slots)
    run(slots, [request], [40])
    slots.settle()

    def refuse(memory: object, num_bytes: int, *, ahead: bool = False) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(slots.parts[0].store._growing["table"]._memory), "commit", refuse)
        assert not slots.make_room(None, 5)
    assert slots.count == 1
    run(slots, [request], [1])
    assert_same_request(slots, request)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("refused", [1, 3, 6, 8])
def test_memory_that_is_refused_halfway_changes_nothing(
    refused: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tensors have more slots already, and the request goes on with those that there were."""
    slots = make_slots(CONFIG, slots=4)
    request = arrive(slots)
    run(slots, [request], [40])
    slots.settle()
    resize, calls = GrowingTensor.resize, []

    def refuse(tensor: GrowingTensor, *arguments: Any) -> None:
        calls.append(tensor)
        if len(calls) == refused:
            raise error("no memory")
        resize(tensor, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(GrowingTensor, "resize", refuse)
        assert not slots.make_room(None, 60)
    assert len(calls) > refused and slots.count == 1
    run(slots, [request], [1])
    other = arrive(slots)
    run(slots, [other, request], [30, 1])
    for each in (request, other):
        assert_same_request(slots, each)
        slots.release(each.slot)
    check_empty(slots)
