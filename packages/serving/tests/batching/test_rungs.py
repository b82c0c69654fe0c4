"""Rows of requests are lowered before anybody waits: each request is what the same lowerings leave of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_diffkv_serving.batching import rungs as rungs_module
from hf_diffkv_serving.batching.part_rungs import RESERVE
from hf_diffkv_serving.batching.slots import Slots
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from native_code import needs_native
from test_ranks import Mirror
from test_slots import (
    DIM,
    GROUP,
    HEADS,
    LAYERS,
    SETTINGS,
    Request,
    SlotMachine,
    follow,
    forward,
    make_slots,
    stores_of,
)
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.layers import layer_configs
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import Store, settle
from hf_diffkv.store.lower_rows import lower_rows

BACKENDS = ["reference", pytest.param("native", marks=needs_native)]
FIELDS = {"window": 4, "sinks": 0, "page_bytes": 192, "rotate": False, "center": False, "alpha_high": 0.0}


# final precisions of the heads of both layers: a part each, of which one has a head that stays; two parts that begin
# alike; and one part with a head, or a layer, that stays
HEADS_OF = {
    "two beginnings": (("K6V5", "K3V2"), ("K4V2", "K4V2")),
    "two ends": (("K3V2", "K3V2"), ("K5V4", "K5V4")),
    "a head stays": (("K8V8", "K4V2"), ("K4V2", "K4V2")),
    "a layer stays": (("K8V8", "K8V8"), ("K4V2", "K4V2")),
}


def until_full(final: str = "K4V2", **fields) -> DiffKVConfig:
    return DiffKVConfig(high=final, low=final, max_bytes="1GB", until_full="K8V8", **{**FIELDS, **fields})


def own_stores(config: DiffKVConfig) -> list[Store]:
    """Stores of a request of its own, one for each layer, all of whose rows are at the final rung."""
    layers = layer_configs(config, LAYERS)
    return stores_of(replace(layer, max_bytes=None, until_full="auto") for layer in layers)


def stays(config: DiffKVConfig) -> Tensor:
    """Which heads keep their first precision, bool [layers, heads]."""
    if config.head_precisions is None:
        return torch.zeros(LAYERS, HEADS, dtype=torch.bool)
    return torch.tensor([[head.name in ("K8V8", "K6V5") for head in layer] for layer in config.head_precisions])


def precise(slots: Slots, slot: int) -> Tensor:
    """Which rows of a request are precise, bool [layers, heads]."""
    found = torch.zeros(LAYERS, HEADS, dtype=torch.bool)
    for part in slots.parts:
        found[part.store.layers] = ~part.store.low_heads[:, slot]
    return found


def follow_rungs(slots: Slots, request: Request, stay: Tensor | None = None) -> None:
    """Does to the stores of its own what was done to the rows of a request, of which those of some heads stay."""
    rows = precise(slots, request.slot)
    assert stay is None or bool(rows[stay].all())
    for layer, store in enumerate(request.alone):
        low = ~rows[layer]
        if request.tokens == 0:
            store.alpha_high[0, 0] = torch.where(low, torch.inf, 0.0)
            continue
        settle(store)
        more = low & ~store.low_heads[0, 0]
        assert not (store.low_heads[0, 0] & ~low).any()
        if more.any():
            lower_rows(store, more[None, None])


class RungMachine(SlotMachine):
    """Slots under random traffic, whose rows are lowered where there is no room."""

    @initialize(
        final=st.sampled_from(["K4V2", "K5V4"]),
        window=st.sampled_from([1, 4]),
        budget=st.sampled_from([13_000, 16_000, 24_000, 34_000]),
        center=st.booleans(),
        row_tokens=st.sampled_from([20, 200, 1 << 16]),
        harm=st.booleans(),
        heads=st.sampled_from([None, *HEADS_OF.values()]),
    )
    def start(
        self, final: str, window: int, budget: int, center: bool, row_tokens: int, harm: bool, heads: tuple | None
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(rungs_module, "ROW_TOKENS", row_tokens)
        self.config = until_full(final, window=window, center=center, rotate=center, head_precisions=heads)
        self.exact, self.stay = window, stays(self.config)
        losses = tuple(tuple(1.0 + layer + 3 * head for head in range(HEADS)) for layer in range(LAYERS))
        self.slots = make_slots(self.config, budget, harm=(lambda precise, final: losses) if harm else None)
        self.requests, self.kept = [], []

    def make_room(self, request: Request | None, tokens: int) -> bool:
        before = self.slots.rungs.lowered
        made = super().make_room(request, tokens)
        if request is None:
            assert self.slots.rungs.lowered - before <= max(rungs_module.ROW_TOKENS, 120)
        elif not made:
            assert_nothing_suffices(self.slots, request, tokens, self.stay)
        return made

    def arrive(self, seed: int) -> None:
        """The rung of a request is chosen when it enters."""
        self.slots.settle()
        tokens = seed % 90
        if self.make_room(None, min(tokens, 30)):
            generator = torch.Generator().manual_seed(seed)
            self.requests.append(Request(self.slots.adopt(tokens), generator, own_stores(self.config)))
            rows = precise(self.slots, self.requests[-1].slot)
            for part in self.slots.parts:
                assert len(rows[part.store.layers][~self.stay[part.store.layers]].unique()) <= 1

    def run(self, chosen: list[tuple[Request, int]], bad: int | None) -> None:
        self.slots.settle()
        planned = [(request, tokens) for request, tokens in chosen if self.plan(request, tokens)]
        for request, _ in planned:
            follow_rungs(self.slots, request, self.stay)
        super_make_room, self.make_room = self.make_room, lambda request, tokens: True
        settled, self.slots.settle = self.slots.settle, lambda: None
        try:
            super().run(planned, bad)
        finally:
            self.make_room, self.slots.settle = super_make_room, settled

    def plan(self, request: Request, tokens: int) -> bool:
        """Makes room and reserves, as the engine does for each request in turn."""
        return self.make_room(request, tokens) and self.slots.reserve(request.slot, tokens)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    @rule(data=st.data())
    def compare(self, data) -> None:
        self.slots.settle()
        for request in self.requests:
            follow_rungs(self.slots, request, self.stay)
        super().compare(data)

    @rule(data=st.data())
    def keep(self, data) -> None:
        for request in self.requests:
            self.slots.settle()
            follow_rungs(self.slots, request, self.stay)
        super().keep(data)

    @rule(data=st.data())
    def fork(self, data) -> None:
        self.slots.settle()
        for request in self.requests:
            follow_rungs(self.slots, request, self.stay)
        super().fork(data)


def entered(slots: Slots, requests: list[Request], tokens: int) -> Request:
    """A request with a prompt of so many tokens, whose forward has run."""
    slots.settle()
    assert slots.make_room(None, tokens)
    request = Request(slots.adopt(tokens), torch.Generator().manual_seed(len(requests)), own_stores(NAMED))
    assert slots.reserve(request.slot, tokens)
    forward(slots, [(request, request.draw(tokens))])
    request.tokens = tokens
    requests.append(request)
    slots.settle()
    return request


def free(slots: Slots) -> int:
    return int(slots.unreserved[0])


def lower(slots: Slots, more: Sequence[int]) -> bool:
    """Lowers rows until each part has so many more free pages, for one that waits."""
    return slots.rungs.lower_for_waiting(slots.unreserved + more, [(slots.count, slots.room.tokens)], slots._requests())


def least_pages(slots: Slots, coming: dict[int, int], stay: Tensor) -> np.ndarray:
    """Counts the pages of requests with further tokens if every row is lowered that may be, by part."""
    found = []
    for part in slots.parts:
        store, table = part.store, part.store.table.table
        shared = (store.pool.owners(table.flatten()) > 1).view(table.shape).any(-1)
        pages = 0
        for slot, more in coming.items():
            end = max(0, slots.seen(slot) + more - part.bounds.exact)
            high = stay[store.layers] | shared[:, slot] & ~store.low_heads[:, slot]
            size = torch.where(high, store.layout.high.capacity, store.layout.low.capacity)
            pages += int((-(-end // size)).sum())
        held = table[table != 0]
        found.append(pages - (held.numel() - held.unique().numel()))
    return np.array(found)


def assert_nothing_suffices(slots: Slots, request: Request, tokens: int, stay: Tensor) -> None:
    """A request in flight finds no room only where some part has too few pages with all at the final rung."""
    coming = {**{slot: slots._reserved.get(slot, 0) for slot in slots._taken}, request.slot: tokens}
    longest = max(slots.seen(slot) + more for slot, more in coming.items())
    if longest <= slots.longest:
        limits = slots.room.limits(*slots.room.sizes_for(len(coming), longest)[-1])
        assert (least_pages(slots, coming, stay) > limits - 1).any()


NAMED = until_full()


def test_requests_enter_precisely_while_pages_are_left() -> None:
    slots, requests = make_slots(NAMED, 40_000, slots=8), []
    rungs = []
    for _ in range(8):
        slots.settle()
        if not slots.make_room(None, 60):
            break
        request = entered(slots, requests, 60)
        rungs.append(bool(precise(slots, request.slot).all()))
        assert precise(slots, request.slot).all() or not precise(slots, request.slot).any()
        # whoever enters precisely leaves a part of the pages to the others
        part = slots.parts[0]
        assert not rungs[-1] or free(slots) >= part.max_pages // RESERVE
    assert rungs[0] and not rungs[-1] and rungs == sorted(rungs, reverse=True)


@pytest.mark.parametrize("harm", [None, ((4.0, 1.0), (3.0, 2.0))])
def test_rows_give_way_in_order_of_harm_and_length(harm: tuple | None) -> None:
    """All rows of the least harm for each page go before others; without losses the longest rows go first."""
    slots, requests = make_slots(NAMED, 60_000, slots=6, harm=harm and (lambda precise, final: harm)), []
    for tokens in (90, 40, 70):
        entered(slots, requests, tokens)
    part, order = slots.parts[0], []
    before = part.store.low_heads.clone()
    assert not before[:, : len(requests)].any()
    high, low = part.store.layout.high.capacity, part.store.layout.low.capacity
    gains = {request.slot: -(-(request.tokens - 4) // high) + (request.tokens - 4) // -low for request in requests}
    while slots.reclaimable().sum():
        pages = free(slots)
        # one page more than there is
        lower(slots, [1])
        assert free(slots) > pages
        now = part.store.low_heads
        rows = [tuple(row) for row in (now & ~before).nonzero().tolist()]
        assert rows
        order += [(1.0 if harm is None else harm[layer][head]) / gains[slot] for layer, slot, head in rows]
        before = now.clone()
        slots.settle()
    assert len(order) == 12 and order == sorted(order)


def test_no_more_is_lowered_in_a_forward_for_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rungs_module, "ROW_TOKENS", 100)
    slots, requests = make_slots(NAMED, 50_000, slots=12), []
    for _ in range(7):
        entered(slots, requests, 60)
    assert slots.rungs.lowered == 0
    assert precise(slots, requests[0].slot).any()
    forwards, lowered = 0, [slots.rungs.lowered]
    while not slots.make_room(None, 60):
        # rows have 56 tokens each: one of them for each forward, whoever asks how often
        assert not slots.make_room(None, 60)
        lowered.append(slots.rungs.lowered)
        assert lowered[-1] - lowered[-2] == 56
        slots.settle()
        forwards += 1
    assert forwards > 0
    # a request in flight gets what it needs at once
    before = slots.rungs.lowered
    slots.settle()
    request = requests[0]
    while slots.reclaimable().sum() and slots.make_room(request.slot, 50):
        assert slots.reserve(request.slot, 50)
        forward(slots, [(request, request.draw(50))])
        request.tokens += 50
        slots.settle()
        if request.tokens + 50 > slots.longest:
            break
    assert slots.bytes <= slots.max_bytes and slots.rungs.lowered >= before


def test_waiting_begins_where_all_rows_at_the_final_rung_do_not_fit() -> None:
    slots, requests = make_slots(NAMED, 22_000, slots=12), []
    while True:
        slots.settle()
        if not slots.make_room(None, 50):
            break
        entered(slots, requests, 50)
    # nothing was refused before its pages at the final rung were more than all that are or could be free
    left = int((slots.unreserved + slots.reclaimable())[0])
    size = (slots.count + 1, slots.room.tokens)
    fewer = slots.parts[0].max_pages - (int(slots.room.limits(*size)[0]) - 1)
    assert slots.need(None, 50)[0] > left - fewer
    # and the same without the rungs: as many requests of the final precision
    final, others = make_slots(replace(NAMED, max_bytes=None, until_full="auto"), 22_000, slots=12), []
    while True:
        final.settle()
        if not final.make_room(None, 50):
            break
        others.append(entered(final, others, 50))
        others.pop()
    assert len(requests) >= len(others) - 1


def test_shared_rows_are_neither_lowered_nor_reclaimable() -> None:
    slots, requests = make_slots(NAMED, 200_000, slots=4), []
    request = entered(slots, requests, 80)
    alone = slots.reclaimable()[0]
    assert alone > 0 and slots.make_room(None, 0)
    follow(slots, requests)
    twin = slots.fork(request.slot)
    assert slots.reclaimable()[0] == 0
    assert not lower(slots, [1])
    slots.release(twin)
    slots.settle()
    assert slots.reclaimable()[0] == alone


def test_keys_are_lowered_for_the_queries_of_all_prompts() -> None:
    config = until_full(adaptive_rounding=True)
    slots = make_slots(config, 60_000, slots=4)
    held, expected_sum = slots.parts[0].store.lowering.moments, 0.0
    assert held.shape == (LAYERS, HEADS, DIM, DIM) and slots.bytes <= slots.max_bytes
    for seed, tokens in enumerate((40, 60)):
        slots.settle()
        assert slots.make_room(None, tokens)
        request = Request(slots.adopt(tokens), torch.Generator().manual_seed(seed), [])
        assert slots.reserve(request.slot, tokens)
        drawn = request.draw(tokens)
        forward(slots, [(request, drawn)])
        queries = torch.stack([query[0].unflatten(0, (HEADS, GROUP)) for query, _, _ in drawn])
        expected_sum = expected_sum + torch.einsum("lhgti,lhgtj->lhij", queries, queries)
    # up to the scale, which rounding does not depend on
    scale = held[0, 0].trace() / expected_sum[0, 0].trace()
    torch.testing.assert_close(held, expected_sum * scale, rtol=1e-4, atol=1e-3)


def test_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="until_full cannot be combined with tensor parallelism.*leave until_full out"):
        make_slots(NAMED, ranks=Mirror())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(100)
def test_requests_are_what_the_same_lowerings_leave_alone(backend: str) -> None:
    with use_backend(backend):
        run_state_machine_as_test(RungMachine, settings=SETTINGS)
