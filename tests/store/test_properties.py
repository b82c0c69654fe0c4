"""Random sequences of operations: no page is lost or owned twice, and a full pool leaves everything unchanged."""

from __future__ import annotations

import pytest
import torch
from given_stores import attend, begin, new_store, select_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from runs import contents
from state_machines import STEADY
from tiny_models import tiny_model

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing
from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import Store, begin_forward, check_integrity, levels, read_tokens

HEADS, GROUP, DIM = 2, 2, 8
SETTINGS = settings(STEADY, max_examples=40, stateful_step_count=15)
THRESHOLDS = [(1.0, 0.5), (0.0, 0.0), (1e9, 0.0), (0.9, 0.9), (1.5, 1.0)]


def snapshot(store: Store) -> dict[str, object]:
    """Everything that a user, or another request, could notice."""
    layers = [read_tokens(store, layer) for layer in range(store.num_layers)]
    return {
        "tokens": [(t.levels, t.keys, t.values, t.score) for t in layers],
        "counts": [t.clone() for t in (store.high_count, store.low_count, store.length, store.window_start)],
        "free": store.pool.free_list.ids(),
        "capacity": store.pool.capacity,
    }


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    assert before["capacity"] == after["capacity"]
    assert torch.equal(before["free"], after["free"])
    for was, now in zip((before["counts"], *before["tokens"]), (after["counts"], *after["tokens"]), strict=True):
        assert all(map(torch.equal, was, now))


def check_pages(store: Store) -> None:
    """Checks that each page except the null page is free or in one place of one row, and levels against counts."""
    owned = []
    tiers = ((store.high_count, store.layout.high, 2), (store.low_count, store.layout.low, 1))
    table = store.table.table
    for tier, (counts, layout, _) in enumerate(tiers):
        for place in (counts > 0).nonzero().tolist():
            pages = -(-int(counts[tuple(place)]) // layout.capacity)
            row = table[tuple(place)].tolist()
            owned += row[:pages] if tier == 0 else row[-pages:]
    assert int((table != 0).sum()) == len(owned)
    free = store.pool.free_list.ids().tolist()
    assert sorted(owned + free) == list(range(1, store.pool.capacity))
    for layer in range(store.num_layers):
        level = levels(store, layer)
        for counts, _, number in tiers:
            assert torch.equal((level == number).sum(-1), counts[layer].long())
        length, start, sinks = store.length[layer], store.window_start[layer], store.config.sinks
        assert (start <= (length - store.config.window).clamp(min=sinks)).all()
        exact = torch.minimum(length, torch.tensor(sinks)) + (length - start).clamp(min=0)
        assert torch.equal((level == 3).sum(-1)[:, 0], exact)


class StoreMachine(RuleBasedStateMachine):
    """One store under random prompts, turns, steps, selections and reads."""

    layers = 2
    limits: tuple[int | None, ...] = (None,)
    refused: dict[str, int] = {}

    @initialize(
        window=st.sampled_from([1, 4]),
        sinks=st.sampled_from([0, 3]),
        thresholds=st.sampled_from(THRESHOLDS),
        batch=st.integers(1, 3),
        data=st.data(),
    )
    def start(self, window: int, sinks: int, thresholds: tuple[float, float], batch: int, data) -> None:
        self.prepare(window, sinks, thresholds, batch, data.draw(st.sampled_from(self.limits)))

    def prepare(
        self, window: int, sinks: int, thresholds: tuple[float, float], batch: int, max_pages: int | None
    ) -> None:
        config = DiffKVConfig(
            high=Precision(8, 4),
            low=Precision(4, 2),
            alpha_high=thresholds[0],
            alpha_low=thresholds[1],
            window=window,
            sinks=sinks,
            page_bytes=192,
        )
        self.store = new_store(config, self.layers, batch, HEADS, DIM, DIM, torch.float32, torch.device("cpu"))
        for layer in range(self.layers):
            self.store.set_thresholds(layer, *thresholds)
        self.store.pool.max_pages = max_pages

    @rule(tokens=st.integers(2, 40), seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 1.0]))
    def several(self, tokens: int, seed: int, share: float) -> None:
        """A prompt or a further turn; a `share` of its tokens is padding."""
        self.forward(tokens, seed, share)

    @precondition(lambda self: self.store.seen > 0)
    @rule(count=st.integers(1, 12), seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.0, 0.4]))
    def steps(self, count: int, seed: int, share: float) -> None:
        for step in range(count):
            self.forward(1, seed + step, share)

    def forward(self, tokens: int, seed: int, share: float) -> None:
        store = self.store
        generator = torch.Generator().manual_seed(seed)
        valid = torch.rand(store.batch_size, tokens, generator=generator) >= share if share else None
        before = snapshot(store) if store.pool.max_pages is not None else None
        try:
            begin_forward(store, tokens)
            for layer in range(store.num_layers):
                query = 3 * torch.randn(store.batch_size, HEADS * GROUP, tokens, DIM, generator=generator)
                states = (query, *torch.randn(2, store.batch_size, HEADS, tokens, DIM, generator=generator))
                assert attend(store, layer, states, Softmax(0.4), valid).isfinite().all()
        except MemoryError as error:
            self.check_refused("several tokens" if tokens > 1 else "a step", before, error)
            return
        store.padding.append(tokens, valid)

    def check_refused(self, what: str, before: dict[str, object], error: MemoryError) -> None:
        assert self.store.pool.max_pages is not None
        assert "limit" in str(error) and "max_bytes" in str(error)
        assert_same(before, snapshot(self.store))
        self.refused[what] = self.refused.get(what, 0) + 1

    @precondition(lambda self: self.store.seen > 0)
    @rule(data=st.data())
    def select(self, data) -> None:
        """Rows are repeated, dropped and reordered; every new row equals its source."""
        self.take(data.draw(st.lists(st.integers(0, self.store.batch_size - 1), min_size=1, max_size=5), label="index"))

    @precondition(lambda self: self.store.seen > 0)
    @rule(times=st.integers(2, 4))
    def repeat(self, times: int) -> None:
        """Every row is repeated, as for beams, which is the selection that needs the most pages."""
        self.take([row for row in range(min(self.store.batch_size, 6)) for _ in range(times)])

    def take(self, index: list[int]) -> None:
        store = self.store
        before = snapshot(store)
        try:
            select_rows(store, torch.tensor(index))
        except MemoryError as error:
            self.check_refused("a selection", before, error)
            return
        assert store.batch_size == len(index)
        for was, now in zip(before["tokens"], snapshot(store)["tokens"]):
            for a, b in zip(was, now):
                assert torch.equal(a[index], b)

    @precondition(lambda self: self.store.seen > 0)
    @rule()
    def read(self) -> None:
        """Reading changes nothing, and anything not stored reads as zero."""
        first = snapshot(self.store)
        assert_same(first, snapshot(self.store))
        for level, keys, values, score in first["tokens"]:
            stored = level > 0
            assert not keys[~stored].any() and not values[~stored].any() and not score[~stored].any()
            assert keys[stored].isfinite().all() and values[stored].isfinite().all()

    def teardown(self) -> None:
        if hasattr(self, "store") and self.store.seen:
            check_integrity(self.store)

    @rule()
    def check(self) -> None:
        check_integrity(self.store)
        check_pages(self.store)


class LimitedStoreMachine(StoreMachine):
    """A pool that is soon full. It has one layer, so that a refused prompt leaves no layer ahead of another."""

    layers = 1
    limits = (6, 12, 24, 48, 96)
    refused = {}


def test_no_page_is_lost_or_owned_twice() -> None:
    run_state_machine_as_test(StoreMachine, settings=SETTINGS)


def test_a_full_pool_leaves_everything_as_it_was() -> None:
    LimitedStoreMachine.refused.clear()
    run_state_machine_as_test(LimitedStoreMachine, settings=SETTINGS)
    assert sum(LimitedStoreMachine.refused.values()) > 10, LimitedStoreMachine.refused


@pytest.mark.parametrize("max_pages", [48, 96])
def test_what_a_full_pool_refuses(max_pages: int) -> None:
    """Fills a pool by steps, then requests a turn and repeated rows: each is refused and changes nothing.

    The rules drawn in a random run depend on the loaded modules, so such a run may never refuse a selection.
    """
    machine = LimitedStoreMachine()
    machine.refused = {}
    machine.prepare(1, 0, (1.0, 0.5), 2, max_pages)
    machine.forward(12, 0, 0.3)
    for seed in range(500):
        machine.forward(1, seed, 0.0)
        if machine.refused:
            break
    machine.forward(60, 0, 0.0)
    machine.take([0, 1, 0, 1, 0, 1])
    assert machine.refused == {"a step": 1, "several tokens": 1, "a selection": 1}
    machine.check()
    machine.take([1])
    machine.forward(1, 0, 0.0)
    assert machine.refused == {"a step": 1, "several tokens": 1, "a selection": 1}, "one row has room again"
    machine.teardown()


def test_selecting_rows_at_every_step() -> None:
    """Beam search selects after every step; the window must still be emptied in time."""
    config = DiffKVConfig(alpha_high=1.0, window=2)
    store = new_store(config, 1, 2, 1, DIM, DIM, torch.float32, torch.device("cpu"))
    store.set_thresholds(0, 1.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    for tokens in [5] + [1] * 40:
        begin(store, tokens)
        attend(store, 0, torch.randn(3, 2, 1, tokens, DIM, generator=generator), Softmax(0.4))
        select_rows(store, torch.tensor([1, 0]))
        check_integrity(store)
        assert (levels(store, 0) > 0).all(), "alpha_low = 0 keeps every token"


def test_a_refused_prompt_leaves_the_whole_cache_as_it_was() -> None:
    """The second layer finds no room after the first has already stored its tokens."""
    model = tiny_model("llama", "diffkv")
    cache = DiffKVCache(model.config, alpha_high=1.0, alpha_low=0.0, window=4)
    tokens = torch.randint(50, (1, 800))
    with torch.no_grad():
        model(tokens[:, :200], **passing(cache))
        before = contents(cache)
        pool = cache.stores.all[0].pool
        pool.max_pages = pool.capacity + 1
        with pytest.raises(MemoryError, match="limit"):
            model(tokens[:, 200:], **passing(cache))
        assert cache.get_seq_length() == 200
        torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
        pool.max_pages = None
        model(tokens[:, 200:201], **passing(cache))
    cache.check_integrity()
    for layer in range(2):
        assert cache.levels(layer)[0, 0, -4:].tolist() == [3, 3, 3, 3]


def test_padding_in_a_step_may_hold_anything() -> None:
    store = new_store(DiffKVConfig(alpha_high=1.0, window=2), 1, 2, 1, DIM, DIM, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for step, tokens in enumerate((5, 1, 1)):
        states = torch.randn(3, 2, 1, tokens, DIM, generator=generator)
        valid = torch.ones(2, tokens, dtype=torch.bool)
        if step == 1:
            valid[1], states[:, 1] = False, torch.nan
        begin(store, tokens, valid)
        assert attend(store, 0, states, Softmax(0.4), valid).isfinite().all()
    check_integrity(store)
