"""Random arrivals, departures and failures on slots: each request is what it would be by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
import torch
from batching import check_empty
from given_stores import new_store
from hf_diffkv_serving.batching.ranks import Ranks
from hf_diffkv_serving.batching.shapes import AttentionShape
from hf_diffkv_serving.batching.slots import Slots
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from state_machines import STEADY
from torch import Tensor

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.config.layers import layer_configs
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages.rows import ROW_STATE
from hf_diffkv.store import PromptAttention, StepAttention, Store, begin_forward, check_integrity, read_tokens

LAYERS, HEADS, GROUP, DIM, SLOTS, LONGEST = 2, 2, 2, 8, 4, 120
SETTINGS = settings(STEADY, max_examples=6, stateful_step_count=12)
THRESHOLDS = [(1.0, 0.5), (0.0, 0.0), (1e9, 0.0), (0.9, 0.9), (1.5, 1.0)]
BUDGETS = {"tight": 22_000, "ample": 400_000}
# of the heads of both layers: none; a pair beside thresholds; a pair in both; a precision for each
PRECISIONS = [
    None,
    *(
        (first, second)
        for first, second in [
            (("K8V4", "K4V2"), None),
            (("K8V4", "K4V2"), ("K4V2", "K4V2")),
            (("K8V8", "K8V8"), ("K4V2", "K4V2")),
        ]
    ),
]
CPU = torch.device("cpu")


def configuration(alpha_high: float = 1.0, alpha_low: float = 0.5, window: int = 4, **fields) -> DiffKVConfig:
    """Small pages, so that there are many."""
    precisions = {"high": Precision(8, 4), "low": Precision(4, 2), "page_bytes": 192, "sinks": 0}
    return DiffKVConfig(**{**precisions, "alpha_high": alpha_high, "alpha_low": alpha_low, "window": window, **fields})


def make_slots(config: DiffKVConfig, max_bytes: int = BUDGETS["ample"], slots: int = SLOTS, **sizes) -> Slots:
    options = {"max_tokens": LONGEST, "max_bytes": max_bytes, **sizes}
    ranks = options.pop("ranks", Ranks())
    shape = AttentionShape(HEADS, HEADS * GROUP, DIM, DIM, torch.float32, CPU, ranks=ranks)
    return Slots(config, shape, LAYERS, slots, **options)


def adopt(slots: Slots) -> int:
    """A slot for a request without tokens, made where none is idle."""
    assert slots.make_room(None, 0)
    return slots.adopt()


@dataclass
class Request:
    """A request in a slot, and its copy on stores of its own, one for each layer.

    Attributes:
        forwards: forwards of this request and those that it continues, each as a unique object and its tokens.
    """

    slot: int
    generator: torch.Generator
    alone: list[Store]
    tokens: int = 0
    forwards: list[tuple[object, int]] = field(default_factory=list)

    def twin(self, slot: int, seed: int) -> Request:
        """Another request that goes on from here."""
        alone, generator = copy.deepcopy(self.alone), torch.Generator().manual_seed(seed)
        return Request(slot, generator, alone, self.tokens, list(self.forwards))

    def common(self, other: Request) -> int:
        """Returns the number of first tokens that come from the same forwards."""
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(self.forwards, other.forwards))
        return sum(tokens for (_, tokens), _ in pairs)

    def draw(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Draws queries, keys and values of each layer for the next tokens."""
        shapes = ((1, HEADS * GROUP, tokens, DIM), (1, HEADS, tokens, DIM), (1, HEADS, tokens, DIM))
        drawn = [[torch.randn(shape, generator=self.generator) for shape in shapes] for _ in range(LAYERS)]
        for query, _, _ in drawn:
            query *= 3
        return drawn

    def run_alone(self, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """The forward on the stores of its own."""
        tokens = inputs[0][0].shape[2]
        outputs = [torch.empty(query.shape) for query, _, _ in inputs]
        for layer, store in enumerate(self.alone):
            seen = store.seen
            begin_forward(store, tokens)
            query, *new = inputs[layer]
            attention = StepAttention if tokens == 1 and seen else PromptAttention
            outputs[layer] = attention(store, 0, *new).attend(query, Softmax(0.4))
            store.padding.append(tokens, None)
        return outputs


def alone_stores(config: DiffKVConfig) -> list[Store]:
    return stores_of(layer_configs(config, LAYERS))


def stores_of(layers: Iterable[DiffKVConfig]) -> list[Store]:
    """A store for each layer of the model."""
    stores = []
    for index, mine in enumerate(layers):
        store = new_store(mine, 1, 1, HEADS, DIM, DIM, torch.float32, CPU, total_layers=LAYERS)
        store.place_layer(0, index)
        store.set_thresholds(0, mine.alpha_high, mine.alpha_low)
        stores.append(store)
    return stores


def forward(slots: Slots, parts: list[tuple[Request, list[tuple[Tensor, Tensor, Tensor]]]]) -> list[list[Tensor]]:
    """One packed forward; each request's output of each layer."""
    counts = [inputs[0][0].shape[2] for _, inputs in parts]
    slots.begin([(request.slot, count) for (request, _), count in zip(parts, counts)])
    outputs = []
    for layer in range(LAYERS):
        packed = (torch.cat(tensors, dim=2) for tensors in zip(*(inputs[layer] for _, inputs in parts)))
        outputs.append(slots.attend(layer, *packed, softmax=Softmax(0.4)).split(counts, dim=2))
    return list(map(list, zip(*outputs)))


def run(slots: Slots, requests: list[Request], counts: list[int]) -> None:
    """A forward of so many tokens of each request, compared with stores of their own."""
    slots.settle()
    for request, count in zip(requests, counts):
        assert slots.make_room(request.slot, count)
        follow(slots, requests)
        assert slots.reserve(request.slot, count)
    parts = [(request, request.draw(count)) for request, count in zip(requests, counts)]
    expected = [request.run_alone(inputs) for request, inputs in parts]
    for outputs, alone in zip(forward(slots, parts), expected):
        for mine, his in zip(outputs, alone):
            torch.testing.assert_close(mine, his, rtol=1e-5, atol=1e-5)
    assert not slots.take_failures() and slots.bytes <= slots.max_bytes
    for request, count in zip(requests, counts):
        request.tokens += count


def follow(slots: Slots, requests: list[Request]) -> None:
    for old, new in slots.take_moves():
        next(one for one in requests if one.slot == old).slot = new


def assert_same_request(slots: Slots, request: Request) -> None:
    """The slot holds what the stores of its own hold, up to rounding of rotations, which differs with their size."""
    slots.settle()
    held = slots.held(request.slot)
    places = {index: (store, layer) for store in held for layer, index in enumerate(store.layers)}
    assert sorted(places) == list(range(len(request.alone)))
    for index, store in enumerate(request.alone):
        mine, alone = read_tokens(*places[index]), read_tokens(store, 0)
        assert torch.equal(mine.levels, alone.levels)
        torch.testing.assert_close(mine.keys, alone.keys, rtol=0, atol=2e-6)
        torch.testing.assert_close(mine.values, alone.values, rtol=0, atol=2e-6)
        torch.testing.assert_close(mine.score, alone.score, rtol=1e-5, atol=1e-6)


def own_pages(store: Store) -> Store:
    """Copies a request to a pool of its own, as for a kept prefix."""
    twin = copy.copy(store)
    twin.pool, twin.table = store.private_pages()
    for name in ROW_STATE:
        setattr(twin, name, getattr(store, name).clone())
    return twin


def full_pages(store: Store, slot: int, tokens: int) -> int:
    """Returns the number of pages that the first `tokens` tokens of all rows in a slot fill; a row has one tier."""
    sizes = torch.where(store.low_count[:, slot] > 0, store.layout.low.capacity, store.layout.high.capacity)
    return int((max(0, tokens) // sizes).sum())


class SlotMachine(RuleBasedStateMachine):
    """Slots under random traffic."""

    @initialize(
        thresholds=st.sampled_from(THRESHOLDS),
        window=st.sampled_from([1, 4]),
        budget=st.sampled_from(sorted(BUDGETS)),
        center=st.booleans(),
        sinks=st.sampled_from([0, 2]),
        precisions=st.sampled_from(PRECISIONS),
    )
    def start(
        self,
        thresholds: tuple[float, float],
        window: int,
        budget: str,
        center: bool,
        sinks: int,
        precisions: tuple | None,
    ) -> None:
        fields = {"window": window, "center": center, "rotate": center, "sinks": sinks, "head_precisions": precisions}
        self.config = configuration(*thresholds, **fields)
        # the budgets are of what is beside sinks: keys, values and a sum of each
        self.exact = window + sinks
        exact = sinks * LAYERS * SLOTS * HEADS * (2 * DIM + 1) * 4
        self.slots = self.make(BUDGETS[budget] + exact)
        self.requests: list[Request] = []
        # what requests held at some time: in slots, and on stores of their own
        self.kept: list[tuple[list[Store], Request]] = []

    def make(self, max_bytes: int) -> Slots:
        return make_slots(self.config, max_bytes)

    def arrive(self, seed: int) -> None:
        self.slots.settle()
        if self.make_room(None, 0):
            generator = torch.Generator().manual_seed(seed)
            self.requests.append(Request(self.slots.adopt(), generator, alone_stores(self.config)))
        elif not self.slots.idle:
            with pytest.raises(MemoryError, match="slots are taken"):
                self.slots.adopt()

    def make_room(self, request: Request | None, tokens: int) -> bool:
        """Calls `Slots.make_room`, and notes the new slots of moved requests."""
        made = self.slots.make_room(None if request is None else request.slot, tokens)
        for old, new in self.slots.take_moves():
            (moved,) = (one for one in self.requests if one.slot == old)
            moved.slot = new
        return made

    @rule(arrivals=st.lists(st.integers(0, 1000), max_size=2), data=st.data())
    def forwards(self, arrivals: list[int], data) -> None:
        """A few forwards; in each of them some requests have one token, some a chunk, some none."""
        for seed in arrivals:
            self.arrive(seed)
        for _ in range(data.draw(st.integers(1, 4), label="forwards")):
            chosen = []
            for request in data.draw(st.permutations(self.requests), label="order"):
                tokens = data.draw(st.sampled_from([1, 30, 0, 1, 2, 7, 1]), label="tokens")
                if tokens and request.tokens + tokens <= self.slots.longest:
                    chosen.append((request, tokens))
            self.run(chosen, data.draw(st.sampled_from([None] * 7 + [0]), label="a bad one"))

    def run(self, chosen: list[tuple[Request, int]], bad: int | None) -> None:
        self.slots.settle()
        parts = []
        for request, tokens in chosen:
            if self.make_room(request, tokens):
                assert self.slots.reserve(request.slot, tokens)
                parts.append((request, request.draw(tokens)))
        if not parts:
            return
        spoiled = parts[bad][0] if bad is not None else None
        expected = [None if request is spoiled else request.run_alone(inputs) for request, inputs in parts]
        if spoiled is not None:
            parts[bad][1][-1][1][0, 0, -1, 0] = torch.nan
        outputs = forward(self.slots, parts)
        failures = self.slots.take_failures()
        assert list(failures) == ([] if spoiled is None else [spoiled.slot])
        for (request, inputs), output, alone in zip(parts, outputs, expected):
            request.tokens += inputs[0][0].shape[2]
            request.forwards.append((object(), inputs[0][0].shape[2]))
            if request is spoiled:
                assert "NaN" in str(failures[request.slot])
                self.leave(request)
                continue
            for mine, his in zip(output, alone):
                torch.testing.assert_close(mine, his, rtol=1e-5, atol=1e-5)

    def leave(self, request: Request) -> None:
        self.slots.release(request.slot)
        self.requests.remove(request)

    @rule(data=st.data())
    def depart(self, data) -> None:
        if self.requests:
            self.leave(data.draw(st.sampled_from(self.requests), label="departs"))

    @rule(data=st.data())
    def fork(self, data) -> None:
        if not self.requests:
            return
        request = data.draw(st.sampled_from(self.requests), label="forked")
        self.slots.settle()
        made, idle = self.make_room(None, 0), self.slots.idle
        slot = self.slots.fork(request.slot)
        if slot is None:
            assert self.slots.idle == idle
            return
        assert made
        self.requests.append(request.twin(slot, slot))

    @rule(data=st.data())
    def keep(self, data) -> None:
        """Keeps a request in the way a prefix is kept."""
        self.slots.settle()
        if begun := [request for request in self.requests if request.tokens]:
            request = data.draw(st.sampled_from(begun), label="kept")
            held = [own_pages(store) for store in self.slots.held(request.slot)]
            self.kept.append((held, request.twin(-1, 0)))

    @rule(data=st.data())
    def begin_alike(self, data) -> None:
        """A request begins with what was kept, beside one that may have the same tokens."""
        self.slots.settle()
        if not self.kept:
            return
        held, kept = data.draw(st.sampled_from(self.kept), label="begins with")
        beside = data.draw(st.sampled_from([None, *self.requests]), label="beside")
        if not self.make_room(None, kept.tokens):
            return
        before, slot = self.slots.used_pages, self.slots.adopt()
        self.slots.load(slot, held, kept.tokens, None if beside is None else beside.slot)
        self.requests.append(kept.twin(slot, data.draw(st.integers(0, 1000), label="seed")))
        common = 0 if beside is None else beside.common(kept)
        for part, taken in zip(self.slots.parts, self.slots.used_pages - before):
            shared = part.held(slot) - taken
            if part.store.layout.selects:
                assert shared == 0
            else:
                # what had left the window when both were one surely; what has left it since perhaps
                assert full_pages(part.store, slot, common - self.exact) <= shared
                assert shared <= full_pages(part.store, slot, common)

    @rule(data=st.data())
    def compare(self, data) -> None:
        for request in self.requests:
            assert self.slots.seen(request.slot) == request.tokens
            if request.tokens:
                assert_same_request(self.slots, request)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert self.slots.bytes <= self.slots.max_bytes
        assert self.slots.idle + len(self.requests) == self.slots.count <= SLOTS
        for part in self.slots.parts:
            check_integrity(part.store)

    def teardown(self) -> None:
        if not hasattr(self, "slots"):
            return
        for request in list(self.requests):
            self.leave(request)
        check_empty(self.slots)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.sampled(100)
def test_requests_are_what_they_would_be_alone(backend: str) -> None:
    with use_backend(backend):
        run_state_machine_as_test(SlotMachine, settings=SETTINGS)
