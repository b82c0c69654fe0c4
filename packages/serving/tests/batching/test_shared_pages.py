"""Requests that begin alike own full pages together, and go on without touching each other."""

from __future__ import annotations

import os

import pytest
import torch
from batching import check_empty, check_slots
from hf_diffkv_serving.batching.first_tokens import KEY_TOKENS, FirstTokens
from hf_diffkv_serving.batching.slots import Slots
from test_slots import (
    Request,
    adopt,
    alone_stores,
    assert_same_request,
    configuration,
    follow,
    full_pages,
    make_slots,
    own_pages,
    run,
)

from hf_diffkv.config import DiffKVConfig

# of the heads of each layer
UNIFORM = configuration(head_precisions=[["K8V4", "K4V2"], ["K4V2", "K4V2"]], rotate=True, center=True, sinks=2)
PRUNES = configuration(rotate=True, center=True, sinks=2)
LOSSLESS = DiffKVConfig.lossless(window=4, page_bytes=512)
EXACT = UNIFORM.window + UNIFORM.sinks


def arrive(slots: Slots, config: DiffKVConfig, seed: int) -> Request:
    slots.settle()
    return Request(adopt(slots), torch.Generator().manual_seed(seed), alone_stores(config))


def fork(slots: Slots, request: Request, requests: list[Request]) -> Request:
    slots.settle()
    assert slots.make_room(None, 0)
    follow(slots, requests)
    twin = request.twin(slots.fork(request.slot), 100 + len(requests))
    requests.append(twin)
    return twin


@pytest.mark.parametrize(
    "config", [UNIFORM, DiffKVConfig.lossless(window=4, page_bytes=512)], ids=["mixed", "lossless"]
)
def test_forks_take_what_is_not_full(config: DiffKVConfig) -> None:
    slots = make_slots(config)
    requests = [arrive(slots, config, 1)]
    run(slots, requests, [75])
    slots.settle()
    before, held = slots.used_pages, [part.held(requests[0].slot) for part in slots.parts]
    full = [full_pages(part.store, requests[0].slot, 75 - config.window - config.sinks) for part in slots.parts]
    assert sum(full) > sum(held) / 2
    for count in (1, 2, 3):
        fork(slots, requests[0], requests)
        partial = [of_part - of_full for of_part, of_full in zip(held, full)]
        assert slots.used_pages.tolist() == [a + count * b for a, b in zip(before, partial)]
        check_slots(slots)
    for counts in ([1, 1, 1, 1], [20, 1, 3, 1], [1, 30, 1, 1]):
        run(slots, requests, counts)
    for request in requests:
        assert_same_request(slots, request)
    for index in (0, 2, 0, 0):
        slots.release(requests.pop(index).slot)
        check_slots(slots)
        for request in requests:
            assert_same_request(slots, request)
    check_empty(slots)


def test_nothing_is_shared_where_tokens_are_chosen() -> None:
    """Sums of what tokens received stand in pages, which every forward changes."""
    slots = make_slots(PRUNES)
    requests = [arrive(slots, PRUNES, 1)]
    run(slots, requests, [75])
    slots.settle()
    before = slots.used_pages
    fork(slots, requests[0], requests)
    assert (slots.used_pages == 2 * before).all()


@pytest.mark.parametrize("beside", ["itself", "another", "a shorter one", None])
def test_what_is_kept_is_shared_with_one_that_has_the_same(beside: str | None) -> None:
    """Pages are compared: requests that are said to begin alike, and do not, share nothing."""
    slots = make_slots(UNIFORM)
    requests = [arrive(slots, UNIFORM, 1)]
    run(slots, requests, [75])
    slots.settle()
    kept, at = requests[0].twin(-1, 5), requests[0].tokens
    held = [own_pages(store) for store in slots.held(requests[0].slot)]
    run(slots, requests, [24])
    if beside == "another":
        requests.append(arrive(slots, UNIFORM, 2))
        run(slots, requests[1:], [80])
    if beside == "a shorter one":
        shorter = arrive(slots, UNIFORM, 1)
        shorter.generator, requests = torch.Generator().manual_seed(3), [*requests, shorter]
        run(slots, requests[1:], [9])
    slots.settle()
    assert slots.make_room(None, at)
    follow(slots, requests)
    before, slot = slots.used_pages, slots.adopt()
    slots.load(slot, held, at, None if beside is None else requests[-1].slot)
    requests.append(kept.twin(slot, 7))
    for part, taken in zip(slots.parts, slots.used_pages - before):
        expected = full_pages(part.store, slot, at - EXACT) if beside == "itself" else 0
        assert part.held(slot) - taken == expected
    check_slots(slots)
    run(slots, requests, [1, 20, 3][: len(requests)])
    for request in requests:
        assert_same_request(slots, request)


def test_a_request_that_needs_more_than_was_counted_is_refused() -> None:
    """It was let in as one that shares pages, which it cannot: what others were promised stays theirs."""
    slots = make_slots(UNIFORM, max_bytes=14_000, slots=2)
    requests, tokens = [arrive(slots, UNIFORM, 1)], 100
    run(slots, requests, [tokens])
    slots.settle()
    held = [own_pages(store) for store in slots.held(requests[0].slot)]
    assert not slots.make_room(None, tokens)
    assert slots.make_room(None, tokens, shared=tokens)
    follow(slots, requests)
    slot, before = slots.adopt(), slots.used_pages
    with pytest.raises(MemoryError, match="not enough pages"):
        slots.load(slot, held, tokens)
    assert (slots.used_pages == before).all() and slots.seen(slot) == 0
    slots.load(slot, held, tokens, requests[0].slot)
    requests.append(requests[0].twin(slot, 2))
    run(slots, requests, [1, 1])
    for request in requests:
        assert_same_request(slots, request)


def test_shared_pages_move_where_slots_need_their_memory() -> None:
    """More slots leave less for pages; those beyond move, once for all that own them."""
    slots = make_slots(UNIFORM, max_bytes=36_000, slots=8)
    requests = [arrive(slots, UNIFORM, seed) for seed in range(3)]
    for request in requests:
        run(slots, [request], [100])
    fork(slots, requests[2], requests)
    for _ in range(2):
        slots.release(requests.pop(0).slot)
    before, moved = slots.parts[0].store.owned_pages().long(), False
    shared = torch.bincount(before) > 1
    while len(requests) < 8:
        fork(slots, requests[0], requests)
        moved |= bool(shared[before[before >= slots.parts[0].store.pool.capacity]].any())
        check_slots(slots)
        for request in requests:
            assert_same_request(slots, request)
    run(slots, requests, [1] * len(requests))
    assert moved


def test_who_begins_alike() -> None:
    first = list(range(100, 100 + KEY_TOKENS))
    known, seen = FirstTokens(), {"a": 90, "b": 90, "c": KEY_TOKENS + 1, "d": 90, "e": 90, "f": 90}
    rows = {
        "a": [*first, 1, 2, 9],
        "b": [*first, 1, 2, 3, 4],
        "c": [*first, 1, 2, 3, 4, 5],
        "d": [8, *first],
        "e": first[:3],
    }
    for name, ids in rows.items():
        known.add(name, torch.tensor(ids))

    def alike(*tokens: int) -> tuple[str | None, int]:
        return known.alike(torch.tensor([*first, *tokens]), seen.__getitem__)

    def expected(*tokens: int) -> tuple[str | None, int]:
        ids = [*first, *tokens]
        common = {name: len(os.path.commonprefix([ids, row[: seen[name]]])) for name, row in rows.items()}
        best = max(common.values())
        return next(name for name in common if common[name] == best), best

    for tokens in ((1, 2, 3, 4, 5), (1,), (8, 8), (1, 2, 3), (1, 2, 9, 9)):
        assert alike(*tokens) == expected(*tokens)
    assert known.alike(torch.tensor([8, 8, *first]), seen.__getitem__) == (None, 0)
    assert known.alike(torch.tensor([], dtype=torch.int64), seen.__getitem__) == (None, 0)
    seen["c"] = 90
    assert alike(1, 2, 3, 4, 5) == ("c", KEY_TOKENS + 5)
    known.remove("c")
    known.remove("nobody")
    known.copy("nobody", "g")
    known.copy("b", "f")
    known.remove("b")
    assert alike(1, 2, 3, 4, 5) == ("f", KEY_TOKENS + 4)
    for name in ("a", "d", "e", "f"):
        known.remove(name)
    assert not known._prompts and not known._keys
