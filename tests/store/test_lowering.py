"""Rows lowered to their final precision against the dense simulation, and their choice against brute force."""

from __future__ import annotations

import random
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
from hf_diffkv.store.lowering import Demand, give_way, lower_rows, rows_to_lower

BACKENDS = ["reference", pytest.param("native", marks=needs_native)]


def until_full(final: str, **fields) -> DiffKVConfig:
    """The configuration of a layer whose budget is never full by itself."""
    fields = {"window": 6, "sinks": 3, "page_bytes": 320, "max_bytes": "1GB", "until_full": "K8V8", **fields}
    return DiffKVConfig(high=final, low=final, alpha_high=0.0, **fields).of_layer(0)


def pair_of(config: DiffKVConfig, **options) -> Pair:
    pair = Pair(config, 3, heads=2, group=2, dim=16, dtype=torch.float32, **options)
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


def worth(demand: Demand, harm: np.ndarray, chosen: np.ndarray) -> tuple[int, float]:
    """Pages that are needed if the rows `chosen` are lowered, and their harm."""
    return int(np.where(chosen, demand.lowered, demand.stay).sum()), float(harm[chosen].sum())


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_of_rows_against_all_choices(seed: int) -> None:
    """It fits, without its last row it does not, and no choice of less harm frees what it frees without that row."""
    chance = np.random.default_rng(seed)
    shape = (2, 2, 2)
    stay, final = chance.integers(0, 6, shape), chance.random(shape) < 0.2
    demand = Demand(stay, stay - chance.integers(0, 9, shape), ~final)
    harm = chance.random(shape) + 0.01
    every = [np.isin(np.arange(8), rows).reshape(shape) for n in range(9) for rows in combinations(range(8), n)]
    every = [chosen for chosen in every if not (chosen & final).any()]
    for pages in range(-25, 30, 3):
        chosen = rows_to_lower(demand, harm, pages)
        fitting = [worth(demand, harm, each)[1] for each in every if worth(demand, harm, each)[0] <= pages]
        assert (chosen is None) == (not fitting)
        if chosen is None:
            continue
        needed, cost = worth(demand, harm, chosen)
        assert needed <= pages and not (chosen & final).any()
        if not chosen.any():
            assert demand.stay.sum() <= pages
            continue
        ratio = np.where(chosen, harm / np.maximum(demand.stay - demand.lowered, 1), 0)
        last = np.unravel_index(ratio.argmax(), shape)
        without = chosen.copy()
        without[last] = False
        assert worth(demand, harm, without)[0] > pages
        assert cost - harm[last] <= min(fitting) + 1e-9


def test_equal_rows_are_lowered_longest_first_and_in_turn_over_layers() -> None:
    held = np.array([[[10, 10]], [[30, 10]], [[10, 10]]]) * 100
    demand = Demand(held // 100, held // 200, np.ones(held.shape, dtype=bool))
    order, chosen = [], np.zeros(held.shape, dtype=bool)
    for pages in range(int(demand.stay.sum()) - 1, int(demand.lowered.sum()) - 1, -1):
        more = rows_to_lower(demand, np.ones(held.shape), pages)
        order += [tuple(map(int, row)) for row in np.argwhere(more & ~chosen)]
        chosen = more
    assert order == [(1, 0, 0), (0, 0, 0), (2, 0, 0), (0, 0, 1), (1, 0, 1), (2, 0, 1)]
