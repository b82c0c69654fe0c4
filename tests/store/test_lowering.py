"""Rows lowered to their final precision, against the dense simulation, and the choice of rows against brute force."""

from __future__ import annotations

import math
import random
import weakref
from itertools import product

import numpy as np
import pytest
import torch
from dense_simulation import HIGH, LOW
from given_stores import select_rows
from native_code import needs_native
from simulated_storage import SimPrecision
from test_compressed import Pair, left_padding
from test_rounded_steps import query_moments

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.quantize.reference import dequantize, quantize, unpack
from hf_diffkv.pages.inset import FULL_RANGE, inset_of
from hf_diffkv.store import settle
from hf_diffkv.store.demand import Demand, rows_to_lower
from hf_diffkv.store.hide import hide_tokens
from hf_diffkv.store.lower_rows import _fewer_bits, _merged, _within_cells, lower_rows, lower_to
from hf_diffkv.store.lowering import give_way, make_room_for_prompt

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
    # the addresses from which captured steps read them
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
        ("K2V2", {"metadata_bits": 16, "adaptive_rounding": True, "until_full": "K3V2"}, True),
    ],
    ids=["K5V4", "K4V3g2/1", "K3V2 for the model's queries", "K4V3 for the prompts'", "two bits stay as they are"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_lowered_at_random_moments_equal_the_simulation(
    backend: str, final: str, fields: dict, measured: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged prompts, steps, turns and hidden tokens, with a row or two lowered between forwards."""
    monkeypatch.setattr("hf_diffkv.store.lower_rows.TOKENS_AT_ONCE", 50)
    moments = {"moments": query_moments(1, 2)} if measured else {}
    chance = random.Random(seed)
    rows = [(request, head) for request in range(3) for head in range(2)]
    chance.shuffle(rows)
    with use_backend(backend):
        pair = pair_of(until_full(final, **fields), **moments)
        # a row that is lowered before it has any tokens
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


def staged(finals: list[str], **fields) -> DiffKVConfig:
    """The configuration of a layer whose heads go through K8V8 and K6V5 to their final precisions in a single store."""
    fields = {"window": 6, "sinks": 3, "page_bytes": 512, "max_bytes": "1GB", "metadata_bits": 16, **fields}
    return DiffKVConfig(head_precisions=[finals], **fields).of_layer(0)


def lower_by_stages(pair: Pair, rungs: np.ndarray) -> None:
    """Lowers rows of both to rungs, counted from the start of their stage, int64 [3, 2]."""
    settle(pair.store)
    simulation, store = pair.simulation, pair.store
    place = [tensor.data_ptr() for tensor in (store.table.table, store.high_count, store.alpha_high)]
    for target in range(1, rungs.max() + 1):
        if target > 1:
            simulation.begin_stage(SimPrecision.of(store.precisions[store.stage + target]))
        for request, head in np.argwhere(rungs >= target):
            if simulation.alpha_high[request, head] == 0:
                simulation.lower(int(request), int(head))
    lower_to(store, rungs[None])
    assert [tensor.data_ptr() for tensor in (store.table.table, store.high_count, store.alpha_high)] == place
    pair.compare()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "finals, fields, measured",
    [
        (["K3V2", "K6V5"], {"adaptive_rounding": True}, True),
        (["K4V3g2/1", "K4V3g2/1"], {"rotate": False, "center": False, "adaptive_rounding": False}, False),
        (["K3V2", "K5V4"], {"adaptive_rounding": True}, False),
        (["K3V3", "K3V3"], {"adaptive_rounding": True}, True),
    ],
    ids=["by K6V5", "both by K6V5", "by K6V5 and K5V4", "both by K6V5 and K4V4"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_go_through_stages_as_in_the_simulation(
    backend: str, finals: list[str], fields: dict, measured: bool, seed: int
) -> None:
    """Between forwards, rows are lowered within a stage, to the next one, and over a whole stage at once."""
    moments = {"moments": query_moments(1, 2)} if measured else {}
    keeps = np.array([final != "K3V2" and len(set(finals)) > 1 for final in finals])
    chance = np.random.default_rng(seed)
    with use_backend(backend):
        pair = pair_of(staged(finals, **fields), **moments)
        store = pair.store
        assert [each.name for each in store.precisions[:2]] == ["K8V8", "K6V5"]
        assert len({layout.page_bytes for layout in store.layouts}) == 1
        assert len(store.layouts) == 2 + (finals in (["K3V3", "K3V3"], ["K3V2", "K5V4"]))
        store.lowering.note_final(0, tuple(0.0 if keep else math.inf for keep in keeps), (1, 2))
        pair.forward(40, left_padding((40, 20, 2)))
        held = []
        for forward in range(12):
            if forward in (2, 3, 7, 9):
                at = store.low_heads[0].numpy().astype(np.int64)
                # half the rows on average, then all, then half to the last precision from where a stage was left
                rungs = np.maximum(at, chance.integers(0, 2, (3, 2)))
                if forward == 7:
                    rungs = np.where(keeps, 1, chance.integers(1, 3, (3, 2)))
                    rungs[0] = 2 - keeps
                if forward == 9:
                    rungs = np.broadcast_to(len(store.layouts) - 1 - store.stage + ~keeps, (3, 2)).copy()
                lower_by_stages(pair, rungs)
                held.append((store.stage, int(store.low_heads.sum())))
            pair.forward(*((1, None) if forward % 5 else (9, left_padding((9, 1, 7)))))
            pair.compare()
        select_rows(store, torch.tensor([2, 0, 0]))
    assert [stage for stage, _ in held] == [0, 0, 1, len(store.layouts) - 1] and held[1][1] > 0
    # as many as end at the last precision; the others are at the one before it
    assert held[-1][1] == 3 * int((~keeps).sum())
    assert (store.high, store.low) == store.precisions[-2:]


@pytest.mark.parametrize("elements", [64, 128])
@pytest.mark.parametrize("bits, fewer", [(6, 4), (5, 4), (4, 4), (4, 3), (4, 2), (3, 3), (3, 2), (2, 2)])
def test_inset_codes_of_fewer_bits_stand_for_whole_cells(bits: int, fewer: int, elements: int) -> None:
    codes = torch.randn(200, elements, generator=torch.Generator().manual_seed(0))
    low, high = codes.amin(-1, keepdim=True), codes.amax(-1, keepdim=True)
    codes = ((codes - low) / (high - low) * (2**bits - 1)).round()
    x = (0.1 * codes - 0.05 * (2**bits - 1)).double()
    inset = inset_of(fewer, elements)
    given = _merged(x, bits, fewer, 1, inset)
    packed, metadata = quantize(given, fewer, 1, metadata_bytes=2, inset=inset)
    same = unpack(packed, fewer) == codes // 2 ** (bits - fewer)
    # five-bit scales may move an element across the midpoint between two codes
    assert same.float().mean() > (0.97 if fewer < 4 else 0.93)
    decoded = dequantize(packed, metadata, fewer, 1, torch.float64)
    if bits == fewer:
        torch.testing.assert_close(decoded, x, rtol=0.04, atol=0.02)
    assert abs(float((decoded * x).sum() / x.square().sum()) - 1) < 0.005


@pytest.mark.parametrize("bits, fewer", [(4, 3), (3, 2), (6, 4)])
def test_codes_of_fewer_bits_stand_for_whole_cells(bits: int, fewer: int) -> None:
    """Lowered elements lie in the middle of equally many old codes; with end-to-end codes they would not."""
    codes = torch.randint(2**bits, (50, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    x, merged = (0.1 * codes - 0.7).double(), 2 ** (bits - fewer)
    middles = 0.1 * (codes // merged * merged + (merged - 1) / 2).double() - 0.7

    def error(rows: torch.Tensor) -> float:
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        step = (high - low) / (2**fewer - 1)
        return float((((rows - low) / step).round() * step + low - middles).abs().max())

    assert error(_within_cells(x, bits, fewer, 1)) < 1e-6 < 0.02 < error(x)
    for inset in (FULL_RANGE, inset_of(fewer, 64)):
        assert torch.equal(_fewer_bits(x, bits, fewer, 2, 1, inset), x)
        assert torch.equal(_fewer_bits(x, 8, 4, 1, 1, inset), x)


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
    """For example, recorded tokens need bytes that the pool holds."""
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


def demand_of(pages: np.ndarray, may_lower: np.ndarray, harm: np.ndarray, **given) -> Demand:
    given = {"page_bytes": 1, "layers": list(range(pages.shape[1])), "now": np.zeros(pages.shape[1:], int), **given}
    given = {"capacity": np.ones(pages.shape[0], int), **given}
    return Demand(pages, may_lower=may_lower, harm=harm, **given)


def worth(demands: list[Demand], chosen: list[np.ndarray]) -> tuple[int, float]:
    """Bytes needed if rows are at these rungs, and the harm done."""
    taken, harm = 0, 0.0
    for demand, rungs in zip(demands, chosen):
        for row in np.ndindex(rungs.shape):
            taken += int(demand.pages[(rungs[row], *row)]) * demand.page_bytes
            harm += sum(float(demand.harm[(rung, *row)]) for rung in range(demand.now[row], rungs[row]))
    return taken, harm


def allowed(demand: Demand, rungs: np.ndarray) -> bool:
    """Whether rows may be at these rungs: forbidden rows stay, and none is two below another."""
    if rungs.max() > max(1, rungs.min() + 1):
        return False
    return all(
        demand.now[row] <= rungs[row] and all(demand.may_lower[(k, *row)] for k in range(demand.now[row], rungs[row]))
        for row in np.ndindex(rungs.shape)
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shapes", [[(2, 2, 2)], [(1, 2, 2), (2, 2, 1)]], ids=["one store", "two stores"])
def test_the_choice_of_rows_against_all_choices(shapes: list[tuple[int, int, int]], seed: int) -> None:
    """It fits, does not fit without its last row, and no less harmful choice frees what it frees without that row."""
    chance = np.random.default_rng(seed)
    demands = []
    for number, shape in enumerate(shapes):
        stay, may_lower = chance.integers(0, 6, shape), chance.random((1, *shape)) >= 0.2
        harm = chance.random((1, *shape)) + 0.01
        pages = np.stack([stay, stay - chance.integers(0, 9, shape)])
        demands.append(demand_of(pages, may_lower, harm, page_bytes=3 + 2 * number))
    every = list(product(*([rungs for rungs in all_rungs(demand)] for demand in demands)))
    costs = [worth(demands, each) for each in every]
    for room in range(-80, 100, 9):
        chosen = rows_to_lower(demands, room)
        fitting = [cost for taken, cost in costs if taken <= room]
        assert (chosen is None) == (not fitting)
        if chosen is None:
            continue
        needed, cost = worth(demands, chosen)
        assert needed <= room and all(map(allowed, demands, chosen))
        if not any(rungs.any() for rungs in chosen):
            assert sum(int(demand.pages[0].sum()) * demand.page_bytes for demand in demands) <= room
            continue
        freed = [np.maximum(demand.pages[0] - demand.pages[1], 1) * demand.page_bytes for demand in demands]
        ratios = [np.where(rungs, demand.harm[0] / gain, 0) for rungs, demand, gain in zip(chosen, demands, freed)]
        store = int(np.argmax([ratio.max() for ratio in ratios]))
        last = np.unravel_index(ratios[store].argmax(), shapes[store])
        without = [rungs.copy() for rungs in chosen]
        without[store][last] = 0
        assert worth(demands, without)[0] > room
        assert cost - demands[store].harm[0][last] <= min(fitting) + 1e-9


def all_rungs(demand: Demand) -> list[np.ndarray]:
    """All combinations of rungs that are allowed."""
    shape, most = demand.now.shape, demand.pages.shape[0]
    every = (np.array(rungs).reshape(shape) for rungs in product(range(most), repeat=demand.now.size))
    return [rungs for rungs in every if allowed(demand, rungs)]


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_over_stages(seed: int) -> None:
    """For two stores of three or four rungs, the choice is allowed, fits, and only grows when less room is left.

    Among all choices that fit, moving by least harm per byte leads close to the best: at most the harm of the last move
    above the minimum, if the moves of each store become more harmful.
    """
    chance = np.random.default_rng(seed)
    demands = []
    for number, (shape, moves) in enumerate((((1, 1, 3), 2), ((2, 1, 1), 3))):
        gains = chance.integers(0, 5, (moves, *shape))
        pages = 30 - np.concatenate([np.zeros((1, *shape), int), gains.cumsum(0)])
        may_lower = np.ones((moves, *shape), dtype=bool)
        may_lower[-1] = chance.random(shape) >= 0.3
        now = chance.integers(0, 2, shape)
        may_lower[0] &= now == 0
        # each stage is more harmful per byte than the one before
        harm = np.maximum(gains, 1) * (chance.random((moves, *shape)) + np.arange(moves).reshape(-1, 1, 1, 1))
        demands.append(demand_of(pages, may_lower, harm, now=now, page_bytes=2 + number))
    every = list(product(*map(all_rungs, demands)))
    costs = [worth(demands, each) for each in every]
    most, least = (max(taken for taken, _ in costs), min(taken for taken, _ in costs))
    assert rows_to_lower(demands, least - 1) is None
    reached, before = set(), None
    for room in range(most, least - 1, -1):
        chosen = rows_to_lower(demands, room)
        needed, cost = worth(demands, chosen)
        assert needed <= room and all(map(allowed, demands, chosen))
        # less room never raises a row again
        assert before is None or all((now >= old).all() for now, old in zip(chosen, before))
        before = chosen
        reached.add(tuple(int(rungs.max()) for rungs in chosen))
        # moves that free nothing are made along the way, so a choice without them does less harm
        free = sum(float(demand.harm[demand.gain == 0].sum()) for demand in demands)
        dearest = max(float(demand.harm.max()) for demand in demands)
        assert cost <= min(cost for taken, cost in costs if taken <= room) + free + dearest + 1e-9
    assert needed == least and max(map(max, reached)) >= 2


@pytest.mark.parametrize("stores", [[[0, 1, 2]], [[0, 2], [1]]], ids=["one store", "two stores"])
def test_equal_rows_are_lowered_longest_first_and_in_turn_over_layers(stores: list[list[int]]) -> None:
    held = np.array([[[10, 10]], [[30, 10]], [[10, 10]]]) * 100
    every = np.ones(held.shape, dtype=bool)
    demands = [
        demand_of(
            np.stack([held[layers] // 100, held[layers] // 200]),
            *(part[None, layers] for part in (every, np.ones(held.shape))),
            layers=layers,
        )
        for layers in stores
    ]
    order, before = [], [demand.now for demand in demands]
    most, least = (sum(int(demand.pages[rung].sum()) for demand in demands) for rung in (0, 1))
    for room in range(most - 1, least - 1, -1):
        chosen = rows_to_lower(demands, room)
        for layers, rows, old in zip(stores, chosen, before):
            order += [(layers[layer], *map(int, row)) for layer, *row in np.argwhere(rows > old)]
        before = chosen
    assert order == [(1, 0, 0), (0, 0, 0), (2, 0, 0), (0, 0, 1), (1, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stores_that_share_a_budget_equal_their_simulations(backend: str) -> None:
    """Two stores with different precisions, page sizes and heads: rows of both are lowered, and pages move across."""
    limit = 130_000
    with use_backend(backend):
        pairs = [
            pair_of(until_full("K5V4", max_bytes=limit, page_bytes=512), place=(0, 2)),
            pair_of(until_full("K3V2", max_bytes=limit, until_full="K6V5"), heads=3, place=(1, 2)),
        ]
        stores = [pair.store for pair in pairs]
        for store in stores:
            store.lowering.harm = np.arange(1.0, 1 + 2 * store.num_heads).reshape(1, 2, -1)
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
    """Lowers in the simulations what was lowered in the stores."""
    for pair in pairs:
        for request, head in (pair.store.low_heads[0] & ~(pair.simulation.alpha_high > 0)).nonzero().tolist():
            pair.simulation.lower(request, head)
