"""Rows lowered to their final precision against the dense simulation, and their choice against brute force."""

from __future__ import annotations

import random
import weakref
from itertools import combinations

import numpy as np
import pytest
import torch
from dense_simulation import HIGH, LOW
from native_code import needs_native
from test_compressed import Pair, left_padding
from test_rounded_steps import query_moments

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import select_rows, settle
from hf_diffkv.store.hide import hide_tokens
from hf_diffkv.store.lower_rows import lower_rows
from hf_diffkv.store.lowering import Demand, give_way, make_room_for_prompt, rows_to_lower

BACKENDS = ["reference", pytest.param("native", marks=needs_native)]


def until_full(final: str, **fields) -> DiffKVConfig:
    """The configuration of a layer whose budget is never full by itself."""
    fields = {"window": 6, "sinks": 3, "page_bytes": 320, "max_bytes": "1GB", "until_full": "K8V8", **fields}
    return DiffKVConfig(high=final, low=final, alpha_high=0.0, **fields).of_layer(0)


def pair_of(config: DiffKVConfig, **options) -> Pair:
    pair = Pair(config, 3, **{"heads": 2, "group": 2, "dim": 16, "dtype": torch.float32, **options})
    pair.tolerance, pair.token_tolerance = 2e-3, 1e-5
    pair.simulation.alpha_high.zero_()
    return pair


def lower(pair: Pair, rows: list[tuple[int, int]]) -> None:
    settle(pair.store)
    chosen = torch.zeros(1, 3, 2, dtype=torch.bool)
    for request, head in rows:
        chosen[0, request, head] = True
        pair.simulation.lower(request, head)
    held = (pair.store.alpha_high, pair.store.high_count, pair.store.low_count, pair.store.table.table)
    places = [tensor.data_ptr() for tensor in held]
    lower_rows(pair.store, chosen)
    # where captured steps read them
    held = (pair.store.alpha_high, pair.store.high_count, pair.store.low_count, pair.store.table.table)
    assert [tensor.data_ptr() for tensor in held] == places
    pair.compare()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "final, fields, measured",
    [
        ("K5V4", {}, False),
        ("K4V3g2/1", {"metadata_bits": 16, "rotate": False, "center": False}, False),
        ("K3V2", {"metadata_bits": 16, "adaptive_rounding": True}, True),
        ("K4V3", {"metadata_bits": 16, "adaptive_rounding": True}, False),
    ],
    ids=["K5V4", "K4V3g2/1", "K3V2 for the model's queries", "K4V3 for the prompts'"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_lowered_at_random_moments_equal_the_simulation(
    backend: str, final: str, fields: dict, measured: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged prompts, steps, turns and hidden tokens, with a row or two lowered between any two forwards."""
    monkeypatch.setattr("hf_diffkv.store.lower_rows.TOKENS_AT_ONCE", 50)
    moments = {"moments": query_moments(1, 2)} if measured else {}
    chance = random.Random(seed)
    rows = [(request, head) for request in range(3) for head in range(2)]
    chance.shuffle(rows)
    with use_backend(backend):
        pair = pair_of(until_full(final, **fields), **moments)
        # a row that is lowered before it has any token
        if seed:
            lower(pair, [rows.pop()])
        pair.forward(40, left_padding((40, 20, 2)))
        pair.compare()
        for forward in range(14):
            if chance.random() < 0.4 and rows:
                lower(pair, [rows.pop() for _ in range(min(len(rows), chance.randint(1, 2)))])
            if forward == 8:
                shown = pair.store.padding.mask().clone()
                shown[0, [5, 9, 10, 13]] = False
                hide_tokens(pair.store, shown)
                pair.simulation.hide(shown)
            pair.forward(*((1, None) if forward % 5 else (9, left_padding((9, 1, 7)))))
            pair.compare()
    levels = pair.simulation.levels()
    assert (levels == LOW).any() and not ((levels == LOW).any(-1) & (levels == HIGH).any(-1)).any()


def test_requests_keep_the_precisions_of_their_rows() -> None:
    with use_backend("reference"):
        pair = pair_of(until_full("K5V4"))
        pair.forward(30)
        lower(pair, [(0, 1), (2, 0)])
        select_rows(pair.store, torch.tensor([2, 0, 0]))
    expected = torch.tensor([[True, False], [False, True], [False, True]])
    assert torch.equal(pair.store.low_heads[0], expected)
    assert torch.equal(pair.store.low_count[0] > 0, expected) and torch.equal(pair.store.high_count[0] > 0, ~expected)


def test_rows_give_way_to_other_memory() -> None:
    """Recorded tokens, say, need bytes that the pool holds."""
    with use_backend("reference"):
        pair = pair_of(until_full("K5V4", max_bytes=60_000, page_bytes=512))
        pair.forward(150)
        store = pair.store
        for row in ((0, 0), (1, 0)):
            lower(pair, [row])
        more = store.max_bytes - store.bytes + 3000
        before = store.low_heads.clone()
        give_way(store, more)
        for request, head in (store.low_heads & ~before)[0].nonzero().tolist():
            pair.simulation.lower(request, head)
        pair.compare()
        assert store.bytes + more <= store.max_bytes and not store.low_heads.all()
        pair.forward(1)
        pair.compare()


def demand_of(stay: np.ndarray, lowered: np.ndarray, may_lower: np.ndarray, harm: np.ndarray, **given) -> Demand:
    given = {"page_bytes": 1, "layers": list(range(stay.shape[0])), **given}
    return Demand(stay, lowered, may_lower, harm, **given)


def worth(demands: list[Demand], chosen: list[np.ndarray]) -> tuple[int, float]:
    """Bytes that are needed if the rows `chosen` are lowered, and their harm."""
    pages = [np.where(rows, demand.lowered, demand.stay).sum() for demand, rows in zip(demands, chosen)]
    taken = sum(int(count) * demand.page_bytes for count, demand in zip(pages, demands))
    return taken, sum(float(demand.harm[rows].sum()) for demand, rows in zip(demands, chosen))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shapes", [[(2, 2, 2)], [(1, 2, 2), (2, 2, 1)]], ids=["one store", "two stores"])
def test_the_choice_of_rows_against_all_choices(shapes: list[tuple[int, int, int]], seed: int) -> None:
    """It fits, without its last row it does not, and no choice of less harm frees what it frees without that row."""
    chance = np.random.default_rng(seed)
    demands = []
    for number, shape in enumerate(shapes):
        stay, may_lower = chance.integers(0, 6, shape), chance.random(shape) >= 0.2
        harm = chance.random(shape) + 0.01
        demands.append(demand_of(stay, stay - chance.integers(0, 9, shape), may_lower, harm, page_bytes=3 + 2 * number))
    cuts = np.cumsum([demand.stay.size for demand in demands])
    every = []
    for rows in (rows for n in range(cuts[-1] + 1) for rows in combinations(range(cuts[-1]), n)):
        flat = np.split(np.isin(np.arange(cuts[-1]), rows), cuts[:-1])
        every.append([part.reshape(shape) for part, shape in zip(flat, shapes)])
    allowed = [all((rows <= demand.may_lower).all() for rows, demand in zip(each, demands)) for each in every]
    every = [worth(demands, each) for each, good in zip(every, allowed) if good]
    for room in range(-80, 100, 9):
        chosen = rows_to_lower(demands, room)
        fitting = [cost for taken, cost in every if taken <= room]
        assert (chosen is None) == (not fitting)
        if chosen is None:
            continue
        needed, cost = worth(demands, chosen)
        assert needed <= room and all((rows <= demand.may_lower).all() for rows, demand in zip(chosen, demands))
        if not any(rows.any() for rows in chosen):
            assert sum(int(demand.stay.sum()) * demand.page_bytes for demand in demands) <= room
            continue
        freed = [np.maximum(demand.stay - demand.lowered, 1) * demand.page_bytes for demand in demands]
        ratios = [np.where(rows, demand.harm / gain, 0) for rows, demand, gain in zip(chosen, demands, freed)]
        store = int(np.argmax([ratio.max() for ratio in ratios]))
        last = np.unravel_index(ratios[store].argmax(), shapes[store])
        without = [rows.copy() for rows in chosen]
        without[store][last] = False
        assert worth(demands, without)[0] > room
        assert cost - demands[store].harm[last] <= min(fitting) + 1e-9


@pytest.mark.parametrize("stores", [[[0, 1, 2]], [[0, 2], [1]]], ids=["one store", "two stores"])
def test_equal_rows_are_lowered_longest_first_and_in_turn_over_layers(stores: list[list[int]]) -> None:
    held = np.array([[[10, 10]], [[30, 10]], [[10, 10]]]) * 100
    every = np.ones(held.shape, dtype=bool)
    demands = [
        demand_of(*(part[layers] for part in (held // 100, held // 200, every, np.ones(held.shape))), layers=layers)
        for layers in stores
    ]
    order, before = [], [np.zeros(demand.stay.shape, dtype=bool) for demand in demands]
    most, least = (sum(int(getattr(demand, name).sum()) for demand in demands) for name in ("stay", "lowered"))
    for room in range(most - 1, least - 1, -1):
        chosen = rows_to_lower(demands, room)
        for layers, rows, old in zip(stores, chosen, before):
            order += [(layers[layer], *map(int, row)) for layer, *row in np.argwhere(rows & ~old)]
        before = chosen
    assert order == [(1, 0, 0), (0, 0, 0), (2, 0, 0), (0, 0, 1), (1, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stores_that_share_a_budget_equal_their_simulations(backend: str) -> None:
    """Two stores of other precisions, page sizes and heads: rows of both are lowered, and pages change hands."""
    limit = 130_000
    with use_backend(backend):
        pairs = [
            pair_of(until_full("K5V4", max_bytes=limit, page_bytes=512), place=(0, 2)),
            pair_of(until_full("K3V2", max_bytes=limit, until_full="K6V5"), heads=3, place=(1, 2)),
        ]
        stores = [pair.store for pair in pairs]
        for store in stores:
            store.lowering.harm = np.arange(1.0, 1 + 2 * store.num_heads).reshape(2, -1)
        shrunk, seen = 0, set()
        for forward in range(200):
            tokens, valid = (1, None) if forward % 20 else (40, left_padding((40, 31, 7)))
            capacities = [store.pool.capacity for store in stores]
            try:
                for store in stores:
                    settle(store)
                for pair, other in (pairs, pairs[::-1]):
                    pair.store.lowering.together = tuple(map(weakref.ref, stores))
                    pair.store.taken = other.store.bytes
                    pair.begin(tokens, valid)
                if tokens > 1:
                    make_room_for_prompt(stores[0], tokens, valid)
            except MemoryError:
                break
            follow(pairs)
            for pair in pairs:
                pair.attend(tokens, valid)
                pair.compare()
            seen.add(tuple(int(store.low_heads.sum()) for store in stores))
            shrunk += sum(store.pool.capacity < capacity for store, capacity in zip(stores, capacities))
            assert sum(store.bytes for store in stores) <= limit
        # in turns, not one store after the other
        assert shrunk and {(0, 0), (6, 9)} < seen and len(seen) > 5, (forward, shrunk, seen)


def follow(pairs: list[Pair]) -> None:
    """Lowers in the simulations what has been lowered in the stores."""
    for pair in pairs:
        for request, head in (pair.store.low_heads[0] & ~(pair.simulation.alpha_high > 0)).nonzero().tolist():
            pair.simulation.lower(request, head)
