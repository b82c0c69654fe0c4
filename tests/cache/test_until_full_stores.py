"""Layers of several precisions or head shapes share a budget: rows of all their stores are lowered to stay in it."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from measured_heads import measured
from native_code import needs_native
from runs import Run, contents, started, tokens
from test_until_full import assert_same_tokens, assert_within
from tiny_models import ragged_prompts, tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.heads import lookup
from hf_diffkv.ops.backend import use_backend

LENGTHS = (200, 90, 150)
BACKENDS = ["reference", pytest.param("native", marks=needs_native)]
# four layers of two heads: each layer's successive precisions, and its heads' final ones
TURNS = [["K8V8", "K6V5", "K3V2"], ["K8V8", "K6V5", "K4V4", "K3V3"], ["K8V8", "K3V2"], ["K8V8", "K6V5", "K5V4"]]
FINAL = [["K6V5", "K3V2"], ["K3V3", "K3V3"], ["K8V8", "K3V2"], ["K5V4", "K5V4"]]
# number of times each head is lowered in the end
MOVES = np.array([[turn.index(name) for name in layer] for layer, turn in zip(FINAL, TURNS)])


def budget(max_bytes: int | None, finals: list[list[str]] = FINAL, **fields) -> DiffKVConfig:
    fields = {"window": 16, "page_bytes": 512, "metadata_bits": 16, **fields}
    return DiffKVConfig(head_precisions=finals, max_bytes=max_bytes, **fields)


def of_all(name: str) -> DiffKVConfig:
    """All tokens with one precision, without a budget."""
    return budget(None, [[name] * 2] * 4)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", "diffkv", dtype=torch.float32, num_hidden_layers=4)


def of_two_shapes() -> PreTrainedModel:
    """The second and fourth layers have one KV head, the others two, which the configuration does not know."""
    made = tiny_model("llama", "diffkv", dtype=torch.float32, num_hidden_layers=4)
    torch.manual_seed(0)
    for layer in made.model.layers[1::2]:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            setattr(attention, name, torch.nn.Linear(made.config.hidden_size, attention.head_dim, bias=False))
        attention.num_key_value_groups = made.config.num_attention_heads
    return made


def lowered(cache: DiffKVCache) -> list[torch.Tensor]:
    """Number of times the rows of each layer were lowered, each int64 [batch, heads]."""
    layers = [cache.layers[layer_idx] for layer_idx in cache.compressed_layers()]
    return [layer.store.stage + layer.store.low_heads[layer.slot].long() for layer in layers]


def assert_none_too_low(cache: DiffKVCache) -> None:
    assert (torch.stack(lowered(cache), 1).numpy() <= MOVES).all()


def count(cache: DiffKVCache) -> int:
    return sum(int(rows.sum()) for rows in lowered(cache))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", ["one", "known", "unknown"])
@pytest.mark.sampled(100)
def test_steps_and_turns_fill_the_budget_until_all_is_final(backend: str, shapes: str, model: PreTrainedModel) -> None:
    limit = {"one": 300_000, "known": 200_000, "unknown": 400_000}[shapes]
    config = budget(limit) if shapes == "one" else DiffKVConfig(max_bytes=limit, window=16, page_bytes=512)
    mine = model if shapes == "one" else of_two_shapes()
    with use_backend(backend):
        cache = DiffKVCache(mine if shapes == "known" else mine.config, config)
        run = started(mine, LENGTHS, cache=cache)
        counts = [count(cache)]
        with pytest.raises(MemoryError, match="with all tokens at K5V4.*until_full=None"):
            for turn in range(12):
                for seed in range(30):
                    before, seen = contents(cache), cache.get_seq_length()
                    run.feed(tokens(3, 1, seed))
                    counts.append(count(cache))
                    assert cache.memory().compressed_bytes <= limit
                assert_within(run)
                before, seen = contents(cache), cache.get_seq_length()
                run.feed(*ragged_prompts((20 + 30 * turn, 3, 60), seed=turn))
                assert_within(run)
                counts.append(count(cache))
    assert counts == sorted(counts) and counts[0] == 0 and len(set(counts)) > 4
    assert cache.get_seq_length() == seen and all(map(torch.equal, before, contents(cache)))
    assert len(cache.stores.all) == (4 if shapes == "one" else 2)
    memory = cache.memory()
    assert memory.compressed_bytes > 0.8 * limit and memory.tokens["pruned"] == 0 and memory.lowered > 0
    if shapes == "one":
        assert memory.until_full == "K8V8" and counts[-1] >= 0.8 * 3 * MOVES.sum()
        assert_none_too_low(cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ample_budgets_store_like_the_first_precisions(backend: str, model: PreTrainedModel) -> None:
    with use_backend(backend):
        mine, other = (started(model, LENGTHS, config) for config in (budget(10**7), of_all("K8V8")))
    assert_same_tokens(mine.cache, other.cache)
    memory = mine.cache.memory()
    assert [layer.precisions for layer in memory.layers] == [("K8V8",) * 2] * 4
    assert (memory.until_full, memory.lowered) == ("K8V8", 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", [False, True], ids=["precisions", "head shapes"])
def test_prompts_that_just_fit_are_stored_like_the_final_precisions(
    backend: str, shapes: bool, model: PreTrainedModel
) -> None:
    """Nothing is quantised twice, in any store: the first prompt is stored bit for bit as without a budget."""
    fields = {"window": 16, "page_bytes": 512}
    # lowering K4V4 to K3V3 frees no page in some rows, which then stay
    finals = [FINAL[0], ["K4V3", "K4V3"], *FINAL[2:]]
    config, mine = (DiffKVConfig(**fields), of_two_shapes()) if shapes else (budget(None, finals), model)
    with use_backend(backend):
        final = started(mine, LENGTHS, cache=DiffKVCache(mine, config))
        least = final.cache.memory().compressed_bytes
        for max_bytes in range(least, 2 * least, 500):
            limited = DiffKVConfig.from_dict({**config.to_dict(), "max_bytes": max_bytes, "until_full": "auto"})
            try:
                run = started(mine, LENGTHS, cache=DiffKVCache(mine, limited))
            except MemoryError:
                continue
            break
        assert max_bytes < 1.2 * least and run.cache.memory().lowered == 0
        assert_same_tokens(run.cache, final.cache)
        assert_within(run)


@pytest.mark.parametrize("limit", [160_000, 180_000, 200_000])
def test_prompts_between_have_one_of_the_precisions(limit: int, model: PreTrainedModel) -> None:
    mine, *of_turn = (started(model, LENGTHS, config) for config in (budget(limit), *map(of_all, TURNS[0])))
    low = lowered(mine.cache)
    assert 0 < count(mine.cache) < 3 * MOVES.sum() and mine.cache.memory().lowered == 0
    assert_within(mine)
    assert_none_too_low(mine.cache)
    # the first layer sees the same keys in all of them
    for got, *parts in zip(*(run.cache.dequantize(0) for run in (mine, *of_turn))):
        for request in range(3):
            for head in range(2):
                assert torch.equal(got[request, head], parts[low[0][request, head]][request, head])


def test_a_prompt_that_does_not_fit_changes_nothing(model: PreTrainedModel) -> None:
    run = started(model, LENGTHS, budget(200_000))
    before = contents(run.cache)
    with pytest.raises(MemoryError, match="with all tokens at K5V4/K3V3/K3V2, [0-9]+ more bytes"):
        run.feed(*ragged_prompts((400, 400, 400)))
    run.cache.check_integrity()
    assert all(map(torch.equal, before, contents(run.cache)))
    run.ids, run.mask = run.ids[:, : run.cache.get_seq_length()], run.mask[:, : run.cache.get_seq_length()]
    run.feed(tokens(3, 1))
    empty = DiffKVCache(model.config, budget(60_000))
    with pytest.raises(MemoryError, match="max_bytes=60000"):
        started(model, LENGTHS, cache=empty)
    assert not empty.stores.all


def test_rows_of_all_stores_are_lowered_by_harm_for_each_byte(model: PreTrainedModel) -> None:
    """Among rows of equal length, no row is lowered while another loses less for its bytes."""
    cache = DiffKVCache(model.config, budget(250_000))
    losses = {
        name: np.random.default_rng(int(name[1::2])).random((4, 2)) for name in ("K6V5", "K5V4", "K4V4", "K3V3", "K3V2")
    }
    cache.stores.harm = lambda precise, final: tuple(map(tuple, losses[final.name].tolist()))
    run = started(model, (150, 150, 150), cache=cache)
    before, seen = torch.stack(lowered(cache), 1).numpy(), set()
    for seed in range(400):
        cache.memory()
        stores = [layer.store for layer in cache.layers]
        # all rows have the same number of tokens, and a read makes room for nine more
        tokens_after = int((stores[0].high_count + stores[0].low_count).max()) + 9
        # loss per byte of every move of a layer's heads
        worth = []
        for layer, (store, turn) in enumerate(zip(stores, TURNS)):
            sizes = [store.layouts[0].high.capacity, *(layout.low.capacity for layout in store.layouts)]
            pages = np.array([-(-tokens_after // size) for size in sizes])
            freed = (pages[:-1] - pages[1:]) * (store.pool.page_bytes + 8)
            worth.append([losses[name][layer] / each for name, each in zip(turn[1:], freed)])
        try:
            run.feed(tokens(3, 1, seed))
        except MemoryError:
            break
        low = torch.stack(lowered(cache), 1).numpy()
        dearest, cheapest = {}, {}
        for request, layer, head in np.ndindex(low.shape):
            made = [worth[layer][move][head] for move in range(before[request, layer, head], low[request, layer, head])]
            dearest[layer] = max([*made, dearest.get(layer, 0.0)])
        for request, layer, head in np.argwhere(low < MOVES):
            # a stage begins when all rows have left the previous one
            if low[request, layer, head] == min(low[:, layer].min(), len(TURNS[layer]) - 2):
                cost = max(worth[layer][low[request, layer, head]][head], dearest[layer])
                cheapest[layer] = min(cost, cheapest.get(layer, math.inf))
        assert max(dearest.values()) <= min(cheapest.values(), default=math.inf)
        before = low
        seen.add(int(low.sum()))
    assert len(seen) > 5


def test_what_is_full_and_what_is_final_is_said_once(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    finals = 0
    for limit in (192_000, 196_000, 200_000, 204_000):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_diffkv"):
            run = started(model, LENGTHS, budget(limit))
            with pytest.raises(MemoryError):
                run.steps(tokens(3, 900))
        full, *final = [record.getMessage() for record in caplog.records]
        assert "heads are lowered from K8V8 to K5V4/K3V3/K3V2, the least harmful first" in full
        # not if the last rows are too small for the next read
        said = bool((torch.stack(lowered(run.cache), 1).numpy() == MOVES).all())
        assert len(final) == said
        assert all(line.startswith("everything is at K5V4/K3V3/K3V2, with room for about ") for line in final)
        finals += said
    assert finals


def test_room_is_what_still_fits(model: PreTrainedModel) -> None:
    run = started(model, (150, 150, 150), budget(200_000))
    promised = run.cache.get_seq_length() + run.cache.memory().room
    with pytest.raises(MemoryError):
        for seed in range(2000):
            run.feed(tokens(3, 1, seed))
    # a read of the device makes room for some steps ahead
    assert promised - 24 <= run.cache.get_seq_length() <= promised + 2


def test_copies_of_requests_lower_rows_or_are_refused(model: PreTrainedModel) -> None:
    for repeats, limit in ((2, 330_000), (2, 500_000), (3, 330_000)):
        run = started(model, LENGTHS, budget(limit))
        before, low = contents(run.cache), count(run.cache)
        try:
            run.cache.batch_repeat_interleave(repeats)
        except MemoryError:
            assert repeats == 3 and all(map(torch.equal, before, contents(run.cache)))
            run.cache.check_integrity()
            continue
        assert count(run.cache) > repeats * low if limit < 500_000 else count(run.cache) >= repeats * low
        run.ids, run.mask = (part.repeat_interleave(repeats, 0) for part in (run.ids, run.mask))
        assert_within(run)
        run.cache.reorder_cache(torch.tensor([5, 5, 0, 1, 2, 5]))
        run.ids, run.mask = run.ids[[5, 5, 0, 1, 2, 5]], run.mask[[5, 5, 0, 1, 2, 5]]
        assert_within(run)
        run.feed(tokens(6, 1))
        assert_within(run)


def test_beams_stay_within_the_budget(model: PreTrainedModel) -> None:
    cache = DiffKVCache(model.config, budget(360_000))
    ids, mask = ragged_prompts(LENGTHS)
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": 2}
    model.generate(ids, attention_mask=mask, **passing(cache), **options)
    model.set_attn_implementation("diffkv")
    cache.check_integrity()
    assert cache.memory().bytes <= 360_000 and cache.memory().lowered > 0


def test_forks_lower_on_their_own(model: PreTrainedModel) -> None:
    run = started(model, LENGTHS, budget(210_000))
    before, low = contents(run.cache), count(run.cache)
    other = run.on(run.cache.fork(1)[0])
    other.steps(tokens(3, 60))
    assert_within(other)
    assert count(other.cache) > low == count(run.cache)
    assert all(map(torch.equal, before, contents(run.cache)))
    run.steps(tokens(3, 60))
    assert_within(run)
    assert count(run.cache) > low


def test_copies_go_on_alike(model: PreTrainedModel) -> None:
    run = started(model, LENGTHS, budget(210_000))
    run.steps(tokens(3, 20))
    twin = run.on(copy.deepcopy(run.cache))
    assert torch.equal(run.steps(tokens(3, 40, 2)), twin.steps(tokens(3, 40, 2)))
    assert_same_tokens(run.cache, twin.cache)
    assert count(run.cache) > 0 and all(map(torch.equal, lowered(run.cache), lowered(twin.cache)))


def test_saved_caches_go_on_where_they_were(model: PreTrainedModel, tmp_path: Path) -> None:
    run = started(model, LENGTHS, budget(212_000))
    run.steps(tokens(3, 10))
    assert 0 < count(run.cache)
    run.cache.save_pretrained(tmp_path)
    other = run.on(DiffKVCache.from_pretrained(tmp_path, model))
    assert_same_tokens(other.cache, run.cache)
    before = count(other.cache), other.cache.memory().lowered
    assert before == (count(run.cache), run.cache.memory().lowered)
    other.steps(tokens(3, 40, 2))
    assert_within(other)
    assert before[0] < count(other.cache)
    assert_none_too_low(other.cache)


def test_recorded_tokens_make_rows_give_way(model: PreTrainedModel) -> None:
    run = started(model, LENGTHS, budget(330_000))
    run.cache.activate_past_recording()
    for seed in range(30):
        run.feed(tokens(3, 8, seed))
        assert_within(run)
        run.crop(seed % 8)
        assert_within(run)
    assert 0 < count(run.cache)


def test_a_cache_is_freed_with_its_last_name(model: PreTrainedModel) -> None:
    """Stores that know each other do not keep each other alive."""
    run = started(model, LENGTHS, budget(180_000))
    run.steps(tokens(3, 2))
    kept = [weakref.ref(store) for store in run.cache.stores.all]
    del run
    assert [store() for store in kept] == [None] * 4


def test_measured_models_have_it_by_themselves(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path))
    lookup.keep(measured(model))
    fields = {"target_ratio": 0.28, "window": 16, "page_bytes": 512}
    cache = DiffKVCache(model, max_bytes=230_000, **fields)
    without, pruned = (
        DiffKVCache(model, **fields, **more) for more in ({}, {"max_bytes": 230_000, "until_full": None})
    )
    assert without.config.head_precisions == pruned.config.head_precisions != cache.config.head_precisions
    assert cache.config.calibration["ratio"] <= 0.4
    run = started(model, LENGTHS, cache=cache)
    memory = cache.memory()
    assert memory.until_full is not None and memory.lowered == 0 and memory.tokens["pruned"] == 0
    assert {name for layer in memory.layers for name in layer.precisions} == {"K8V8"}
    assert cache.stores.harm is not None
    with pytest.raises(MemoryError):
        run.steps(tokens(3, 2000))
    assert_within(run)
    finals = [[precision.full_name for precision in layer] for layer in cache.config.head_precisions]
    # a read makes room for nine tokens or for none, so some rows may remain
    ends = [[name.split("/")[-1] for name in layer.precisions] for layer in cache.memory().layers]
    assert ends == finals


@pytest.mark.parametrize("until_full", ["auto", None])
@pytest.mark.parametrize("shapes", [False, True], ids=["one shape", "head shapes"])
def test_recorded_prompts_need_room_for_what_stays_recorded(
    shapes: bool, until_full: str | None, model: PreTrainedModel
) -> None:
    """The rest of a long prompt is stored at once; uncompressed it would take nearly twice the budget."""
    mine, limit = of_two_shapes() if shapes else model, 1_000_000
    cache = DiffKVCache(mine, max_bytes=limit, until_full=until_full, page_bytes=512)
    cache.activate_past_recording()
    run = Run(mine, cache)
    for count in (900, 100, 600):
        run.feed(tokens(1, count))
        assert_within(run)
        run.crop(3)
        assert_within(run)
