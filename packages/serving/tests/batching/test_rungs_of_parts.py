"""Layers of several precisions are parts with pages of their own: each lowers its own rows, and no head that stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batching import check_slots
from hf_diffkv_serving.batching.part_rungs import RESERVE
from hf_diffkv_serving.batching.slots import Slots
from hf_diffkv_serving.batching.until_full import rung_config
from test_rungs import HEADS_OF, entered, least_pages, lower, precise, stays, until_full
from test_slots import HEADS, LAYERS, LONGEST, Request, follow, forward, make_slots, own_pages
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.layers import layer_configs
from hf_diffkv.store import read_tokens

NAMES = sorted(HEADS_OF)
# tokens that stay exact
EXACT = 4
HARM = ((3.0, 2.0), (1.0, 4.0))


def named(heads: str) -> DiffKVConfig:
    return until_full(head_precisions=HEADS_OF[heads])


def filled(heads: str, max_bytes: int = 120_000, tokens: tuple[int, ...] = (90, 40, 70)) -> tuple[Slots, list[Request]]:
    """Slots with requests that have entered precisely."""
    slots, requests = make_slots(named(heads), max_bytes, slots=6, harm=lambda precise, final: HARM), []
    for count in tokens:
        entered(slots, requests, count)
        assert precise(slots, requests[-1].slot).all() and precise(slots, requests[-1].slot).shape == (LAYERS, HEADS)
    return slots, requests


def rows_of(slots: Slots, requests: list[Request]) -> Tensor:
    """Which rows are precise, bool [requests, layers, heads]."""
    return torch.stack([precise(slots, request.slot) for request in requests])


def first_rows(slots: Slots, requests: list[Request], lacking: list[int], stay: Tensor) -> set[tuple[int, int, int]]:
    """Chooses rows as the documents say, from the requests' tokens alone: (request, layer, head) of each.

    Rows that free several pages come before the others, then those of least harm for each page.
    """
    chosen = set()
    for part, pages in zip(slots.parts, lacking):
        sizes = (part.store.layout.high.capacity, part.store.layout.low.capacity)
        rows = []
        for index, request in enumerate(requests):
            stored = request.tokens - EXACT
            high, low = (-(-stored // size) for size in sizes)
            rows += [
                (HARM[layer][head] / (high - low), layer, index, head, high - low)
                for layer in part.store.layers
                for head in range(HEADS)
                if not stay[layer, head] and high - low > 0
            ]
        several = [row for row in rows if row[-1] > 1]
        rows = sorted(
            several if sum(row[-1] for row in several) >= pages else rows, key=lambda row: (row[0], *row[3:0:-1])
        )
        while pages > 0:
            _, layer, index, head, freed = rows.pop(0)
            chosen.add((index, layer, head))
            pages -= freed
    return chosen


@pytest.mark.parametrize("heads", NAMES)
def test_layers_with_the_same_rungs_are_a_part_with_both(heads: str) -> None:
    slots = make_slots(named(heads))
    rungs = {
        index: (part.store.config.high.name, part.store.config.low.name)
        for part in slots.parts
        for index in part.store.layers
    }
    # a kept prefix is in stores of the same layers with the same pages
    kept = layer_configs(rung_config(named(heads)), LAYERS)
    assert rungs == {index: (layer.high.name, layer.low.name) for index, layer in enumerate(kept)}
    assert {tuple(part.store.layers) for part in slots.parts} == {
        tuple(index for index in rungs if rungs[index] == pair) for pair in rungs.values()
    }
    assert slots.rung_counts().precise == ("K8V8/K6V5" if heads == "two beginnings" else "K8V8")


@pytest.mark.parametrize("heads", NAMES)
@pytest.mark.parametrize("more", [1, 2, 5, 9])
def test_a_part_lowers_the_least_harmful_rows_for_its_own_pages(heads: str, more: int) -> None:
    stay = stays(named(heads))
    for place in range(len(filled(heads)[0].parts)):
        slots, requests = filled(heads)
        lacking = [0] * len(slots.parts)
        lacking[place] = min(more, int(slots.reclaimable()[place]))
        expected = first_rows(slots, requests, lacking, stay)
        assert expected and lower(slots, lacking)
        found = {(index, layer, head) for index, layer, head in (~rows_of(slots, requests)).nonzero().tolist()}
        assert found == expected
        check_slots(slots)


@pytest.mark.parametrize("heads", NAMES)
def test_nothing_is_lowered_for_one_that_waits_where_a_part_cannot_get_enough(heads: str) -> None:
    slots, requests = filled(heads)
    for place in range(len(slots.parts)):
        lacking = [1] * len(slots.parts)
        lacking[place] = int(slots.reclaimable()[place]) + 1
        assert not lower(slots, lacking)
        assert rows_of(slots, requests).all() and slots.rungs.lowered == 0


@pytest.mark.parametrize("heads", ["two beginnings", "two ends"])
def test_nothing_is_lowered_for_one_in_flight_where_a_part_cannot_get_enough(heads: str) -> None:
    found, stay = 0, stays(named(heads))
    for max_bytes in range(22_500, 25_500, 250):
        slots, requests = make_slots(named(heads), max_bytes, slots=6, harm=lambda precise, final: HARM), []
        for _ in range(3):
            slots.settle()
            if slots.make_room(None, 60) and slots.rungs.lowered == 0:
                entered(slots, requests, 60)
        before, lowered = rows_of(slots, requests), slots.rungs.lowered
        request, more = requests[0], LONGEST - 60
        least = least_pages(slots, {each.slot: more * (each is request) for each in requests}, stay)
        limits = slots.room.limits(*slots.room.sizes_for(len(requests), LONGEST)[-1]) - 1
        if (least <= limits).all():
            continue
        lacks = slots.need(request.slot, more) > limits - slots.used_pages
        assert not slots.make_room(request.slot, more)
        assert torch.equal(rows_of(slots, requests), before) and slots.rungs.lowered == lowered
        # lowering would have been of use in the other part
        found += bool((lacks & (least <= limits)).any())
    assert found


@pytest.mark.parametrize("heads", NAMES)
def test_heads_that_stay_are_never_lowered(heads: str) -> None:
    stay = stays(named(heads))
    slots, requests = filled(heads)
    while (left := slots.reclaimable()).any():
        assert lower(slots, list(np.minimum(left, 3)))
        slots.settle()
    assert torch.equal(rows_of(slots, requests), stay.expand(len(requests), -1, -1))
    assert slots.rung_counts().precise_share == pytest.approx(float(stay.float().mean()))
    assert slots.rungs.lowered == sum(request.tokens - EXACT for request in requests) * int((~stay).sum())
    # and those that enter at the final rung keep them as well
    slot = slots.adopt() if slots.make_room(None, 0) else -1
    assert torch.equal(precise(slots, slot), stay)


@pytest.mark.parametrize("heads", NAMES)
def test_admission_counts_the_final_pages_of_each_head(heads: str) -> None:
    slots, stay = make_slots(named(heads), 34_000), stays(named(heads))
    for tokens in (1, EXACT, EXACT + 1, 37, 90):
        stored = max(0, tokens - EXACT)
        wanted = [
            sum(
                -(-stored // (high if stay[layer, head] else low))
                for layer in part.store.layers
                for head in range(HEADS)
            )
            for part in slots.parts
            for high, low in [(part.store.layout.high.capacity, part.store.layout.low.capacity)]
        ]
        assert slots.need(None, tokens).tolist() == wanted


@pytest.mark.parametrize("heads", NAMES)
def test_the_longest_request_fits_and_no_longer_one(heads: str) -> None:
    slots = make_slots(named(heads), 10_000)
    longest = slots.longest
    assert EXACT < longest < LONGEST
    request = Request(_adopted(slots, 20), torch.Generator().manual_seed(0), [])
    while request.tokens < longest:
        slots.settle()
        more = min(20, longest - request.tokens)
        assert slots.make_room(request.slot, more)
        follow(slots, [request])
        assert slots.reserve(request.slot, more)
        forward(slots, [(request, request.draw(more))])
        request.tokens += more
    slots.settle()
    assert slots.bytes <= slots.max_bytes
    assert torch.equal(precise(slots, request.slot) | ~stays(named(heads)), torch.ones(LAYERS, HEADS, dtype=torch.bool))
    limits = slots.room.limits(1, longest + 1)
    assert (slots.need(None, longest + 1) > limits - 1).any()


def _adopted(slots: Slots, tokens: int) -> int:
    slots.settle()
    assert slots.make_room(None, tokens)
    return slots.adopt(tokens)


@pytest.mark.parametrize("heads", NAMES)
def test_room_is_what_all_parts_have_at_the_final_rung(heads: str) -> None:
    slots, requests = make_slots(named(heads), 26_000, slots=6), []
    for tokens in (50, 40, 70):
        entered(slots, requests, tokens)
    stay, counts = stays(named(heads)), slots.rung_counts()

    def fits(more: int) -> bool:
        least = least_pages(slots, {request.slot: more for request in requests}, stay)
        return bool((least <= slots.max_pages).all())

    assert counts.room == max((more for more in range(1, slots.longest + 1) if fits(more)), default=0)
    assert 0 < counts.room < slots.longest


def test_each_part_chooses_the_rung_of_a_request_that_enters() -> None:
    """A request may be precise in one part and not in another, by the pages that are left there."""
    found, stay = set(), stays(named("two beginnings"))
    for max_bytes in range(14_000, 24_000, 500):
        slots, requests = make_slots(named("two beginnings"), max_bytes, slots=6), []
        for tokens in (60, 60, 60):
            slots.settle()
            if not slots.make_room(None, tokens):
                break
            spare = [part.unreserved - part.max_pages // RESERVE for part in slots.parts]
            slot = slots.adopt(tokens)
            rows = precise(slots, slot)
            for part, left in zip(slots.parts, spare):
                size = part.store.layout.high.capacity
                fits = len(part.store.layers) * HEADS * -(-(tokens - EXACT) // size) <= left
                assert torch.equal(rows[part.store.layers], (stay | fits)[part.store.layers])
            found.add(tuple(rows.flatten().tolist()))
            request = Request(slot, torch.Generator().manual_seed(0), [])
            slots.settle()
            if not slots.make_room(slot, tokens):
                break
            follow(slots, [*requests, request])
            assert slots.reserve(request.slot, tokens)
            forward(slots, [(request, request.draw(tokens))])
            requests.append(request)
    assert len(found) > 2


@pytest.mark.parametrize("heads", [None, *NAMES])
def test_rows_whose_pages_are_to_be_shared_do_not_give_way(heads: str | None) -> None:
    """A request begins with a kept prefix beside one that begins alike, and others make room for what is its own."""
    config, found = until_full() if heads is None else named(heads), 0
    for max_bytes in range(28_000, 36_000, 1_000):
        slots, requests = make_slots(config, max_bytes, slots=6, harm=lambda precise, final: HARM), []
        for tokens in (60, 60, 60):
            slots.settle()
            if slots.make_room(None, tokens):
                entered(slots, requests, tokens)
        first = requests[0]
        if not precise(slots, first.slot).all() or not slots.make_room(None, LONGEST, shared=first.tokens):
            continue
        follow(slots, requests)
        held, before = [own_pages(store) for store in slots.held(first.slot)], _values(slots, first.slot)
        rows, lowered, slot = precise(slots, first.slot), slots.rungs.lowered, slots.adopt(LONGEST)
        try:
            slots.load(slot, held, LONGEST, first.slot)
        except MemoryError:
            slots.release(slot)
        else:
            found += slots.rungs.lowered > lowered
            assert all(map(torch.equal, _values(slots, slot), before))
        assert all(map(torch.equal, _values(slots, first.slot), before))
        assert torch.equal(precise(slots, first.slot), rows)
        check_slots(slots)
    assert found


def _values(slots: Slots, slot: int) -> list[Tensor]:
    """Returns keys and values of each layer of a request."""
    held = {index: (store, layer) for store in slots.held(slot) for layer, index in enumerate(store.layers)}
    read = [read_tokens(*held[index]) for index in sorted(held)]
    return [tensor.clone() for tokens in read for tensor in (tokens.keys, tokens.values)]
