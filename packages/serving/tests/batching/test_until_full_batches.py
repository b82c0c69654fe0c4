"""Continuous batching that is precise until its budget is full: texts, memory, and the order of what gives way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batching import chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.manager import DiffKVBatchingManager
from hf_diffkv_serving.batching.slots import Slots
from hf_diffkv_serving.batching.until_full import rung_config
from hf_diffkv_serving.server.app import statistics
from hf_diffkv_serving.server.health import Health
from hf_diffkv_serving.server.metrics import _EngineCollector
from hf_diffkv_serving.server.run import line
from measured_heads import measured
from test_continuous import Watch, collect, serve
from tiny_models import tiny_model
from transformers import ContinuousBatchingConfig, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, PrefixStore
from hf_diffkv.compat import passing
from hf_diffkv.config.layers import layer_configs
from hf_diffkv.heads import lookup
from hf_diffkv.store import settle
from hf_diffkv.store.lower_rows import lower_rows

CROWD = (70, 60, 75, 50)
NEW = 32
# nothing is rounded for queries, of which those of all requests count when rows are lowered
FINAL = DiffKVConfig.preset("balanced", window=8, page_bytes=512, adaptive_rounding=False)
NAMED = replace(FINAL, max_bytes="1GB", until_full="K8V8")
# of two layers with two heads, in a store each; the first one begins at K6V5, and one of its heads stays there
MEASURED = replace(NAMED, head_precisions=[["K6V5", "K3V2"], ["K4V3", "K4V3"]])
# the budget that names a precision, and all tokens at the precise rungs
RUNGS = {"one": (NAMED, [["K8V8"] * 2] * 2), "measured": (MEASURED, [["K6V5"] * 2, ["K8V8"] * 2])}


def at_first(rungs: str) -> DiffKVConfig:
    """The configuration that stores all tokens precisely, without a budget."""
    return replace(FINAL, head_precisions=RUNGS[rungs][1])


class RungWatch(Watch):
    """Also records at which rung the rows of a request were in each of its forwards, and the most of both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.monkeypatch = monkeypatch
        self.low: dict[str, list[torch.Tensor]] = {}
        extend = ContinuousCache.extend_read_and_write_indices

        def watched(cache: ContinuousCache, request_id: str, past: int, tokens: int, *indices: Any) -> None:
            held = self.low.setdefault(request_id, [])
            if past == 0:
                held.clear()
            slot, stores = cache._slot_of[request_id], [part.store for part in cache.slots.parts]
            rows = {index: store.low_heads[i, slot] for store in stores for i, index in enumerate(store.layers)}
            held.append(torch.stack([rows[index] for index in sorted(rows)]))
            extend(cache, request_id, past, tokens, *indices)

        monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", watched)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> RungWatch:
    return RungWatch(monkeypatch)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64)


def replay(
    model: PreTrainedModel, config: DiffKVConfig, watch: RungWatch, name: str, text: list[int]
) -> tuple[list[int], DiffKVCache]:
    """Runs a request's forwards, and its lowerings between them, on a cache of its own.

    Args:
        config: configuration with both rungs of each layer.

    Returns:
        The likeliest token after each forward, and the cache.
    """
    cache, at, likeliest = DiffKVCache(model.config, FINAL), 0, []
    entered = [tuple(torch.inf if low else 0.0 for low in layer) for layer in watch.low[name][0].tolist()]
    layers = zip(layer_configs(config, len(entered)), entered)
    cache.stores.configs = tuple(
        replace(layer, max_bytes=None, until_full="auto", alpha_high=alphas) for layer, alphas in layers
    )
    model.set_attn_implementation("diffkv")
    for tokens, low in zip(watch.forwards[name], watch.low[name], strict=True):
        for store in cache.stores.all:
            settle(store)
            mine = low[store.layers][:, None]
            more = mine & ~store.low_heads
            assert not (store.low_heads & ~mine).any()
            if more.any():
                lower_rows(store, more)
        with torch.no_grad():
            logits = model(torch.tensor([text[at : at + tokens]]), **passing(cache)).logits
        likeliest.append(int(logits[0, -1].argmax()))
        at += tokens
    model.set_attn_implementation("sdpa")
    return likeliest, cache


def assert_reported(manager: DiffKVBatchingManager, precise: str) -> None:
    """Metrics and the line for people say what the statistics do."""
    found = manager.statistics()
    samples = [
        sample for family in _EngineCollector(manager, Health(manager, 1.0)).collect() for sample in family.samples
    ]
    values = {sample.name.removeprefix("hf_diffkv_"): sample.value for sample in samples}
    assert values["tokens_precise_ratio"] == found.memory.precise_share == 1.0
    assert values["tokens_lowered_total"] == found.memory.lowered > 0
    assert values["preemptions_total"] == found.preemptions
    assert values["room_tokens"] == found.memory.room == found.memory.longest
    assert f", 100% of tokens at {precise};" in line(statistics(manager), 0.0)


@pytest.mark.parametrize("rungs", RUNGS)
def test_an_ample_budget_gives_the_text_of_the_precise_precisions(
    rungs: str, model: PreTrainedModel, watch: RungWatch
) -> None:
    given, precise = prompts(), at_first(rungs)
    config = request_config(RUNGS[rungs][0], 8 << 20, max_new_tokens=NEW)
    outputs = model.generate_batch(given, config, chunks(512))
    model.set_attn_implementation("diffkv")
    want = [expected(model, ids, NEW, **passing(DiffKVCache(model.config, precise))) for ids in given]
    assert [output.generated_tokens for output in outputs.values()] == want
    assert not any(low.any() for each in watch.low.values() for low in each)
    watch.assert_nothing_left()


@pytest.mark.parametrize(
    "rungs, max_bytes", [("one", 70_000), ("one", 90_000), ("one", 100_000), ("measured", 62_000), ("measured", 90_000)]
)
def test_requests_are_what_their_lowerings_leave_of_them_alone(
    rungs: str, max_bytes: int, model: PreTrainedModel, watch: RungWatch
) -> None:
    """Compares tokens and levels with the same forwards and lowerings on a cache of the request's own."""
    given, named = prompts(CROWD), RUNGS[rungs][0]
    precise = {"one": "K8V8", "measured": "K8V8/K6V5"}[rungs]
    config = request_config(named, max_bytes, max_new_tokens=NEW)
    manager = serve(model, config, safety_margin=0.0)
    names = {manager.add_request(ids, request_id=str(i)) for i, ids in enumerate(given)}
    try:
        outputs = collect(manager, names)
        found = manager.statistics()
        assert_reported(manager, precise)
    finally:
        manager.stop()
    model.set_attn_implementation("sdpa")
    assert max(watch.bytes) <= max_bytes and found.preemptions == watch.preempted
    lowered = torch.stack([low for each in watch.low.values() for low in each])
    assert lowered.any() and found.memory.until_full == precise
    assert rungs == "one" or not lowered[:, 0, 0].any()
    compared = 0
    for index, ids in enumerate(given):
        text = ids + outputs[str(index)].generated_tokens
        likeliest, cache = replay(model, named, watch, str(index), text)
        # those after a prompt in parts, and after what was said before a preemption
        ends = torch.tensor(watch.forwards[str(index)]).cumsum(0).tolist()
        first = max((i for i, tokens in enumerate(watch.forwards[str(index)]) if tokens > 1), default=0)
        for place, end in enumerate(ends):
            if place >= first and end >= len(ids):
                assert likeliest[place] == text[end]
                compared += 1
        for layer, mine in zip(cache.compressed_layers(), watch.levels[str(index)], strict=True):
            assert torch.equal(mine, cache.levels(layer))
    assert compared > len(given) * NEW // 2
    watch.assert_nothing_left()


def test_as_many_are_in_flight_as_at_the_final_precision(watch: RungWatch) -> None:
    model, given, figures = tiny_model("llama"), prompts((100,) * 10), []
    for config in (replace(FINAL, high="K8V8", low="K8V8"), FINAL, NAMED):
        watch.requests = 0
        outputs = model.generate_batch(given, request_config(config, 150_000), chunks(512, safety_margin=0.0))
        assert all(output.error is None for output in outputs.values())
        figures.append(watch.requests)
    precise, final, mine = figures
    # pages that hold either precision are filled less
    assert precise < final - 1 <= mine
    assert max(watch.bytes) <= 150_000
    watch.assert_nothing_left()


@pytest.mark.parametrize("rungs, max_bytes", [("one", 36_000), ("measured", 45_000)])
def test_the_longest_request_is_admitted_alone_and_served(rungs: str, max_bytes: int, model: PreTrainedModel) -> None:
    """Admission counts final bytes."""
    config = request_config(RUNGS[rungs][0], max_bytes, max_new_tokens=8)
    manager = model.init_continuous_batching(config, chunks(64))
    longest = manager.memory().longest
    precise = request_config(at_first(rungs), max_bytes)
    assert longest > model.init_continuous_batching(precise, chunks(64)).memory().longest
    manager.start()
    # it enters precisely or not, and meanwhile another one comes and goes
    names = {manager.add_request(prompts((length,))[0], max_new_tokens=longest + 1 - length) for length in (20, 30)}
    done = collect(manager, names)
    assert all(output.error is None for output in done.values())
    refused = manager.add_request(prompts((longest,))[0], max_new_tokens=3)
    assert "longest possible request" in collect(manager, {refused})[refused].error
    manager.stop()


@pytest.mark.parametrize("rungs", RUNGS)
def test_prefixes_keep_their_rung(rungs: str, model: PreTrainedModel, watch: RungWatch) -> None:
    named = RUNGS[rungs][0]
    store = PrefixStore(model, rung_config(named), device_bytes=1 << 20)
    ids, more, system = prompts((90, 20, 60))
    # computed on a cache of its own, with the attention that the model has then
    assert store.prefill(system)
    manager = model.init_continuous_batching(request_config(named, 300_000, max_new_tokens=6), chunks(512))
    manager.use_prefixes(store)
    manager.start()
    first = manager.add_request(ids, request_id="first")
    done = collect(manager, {first})[first]
    again = manager.add_request(ids + done.generated_tokens + more, request_id="again")
    collect(manager, {again})
    assert store.stats.tokens_reused >= len(ids) and not watch.low["again"][0].any()
    reused = store.stats.tokens_reused
    chat = manager.add_request(system + more, request_id="chat")
    output = collect(manager, {chat})[chat].generated_tokens
    assert store.stats.tokens_reused == reused + len(system) and not watch.low["chat"][0].any()
    manager.stop()
    # the same as on a cache that is precise, computed in the same parts
    cache = DiffKVCache(model.config, at_first(rungs))
    model.set_attn_implementation("diffkv")
    for part in (system, more):
        with torch.no_grad():
            logits = model(torch.tensor([part]), **passing(cache)).logits
    assert output[0] == int(logits[0, -1].argmax())
    watch.assert_nothing_left()


def test_a_prefix_without_room_is_computed_by_one_alone(model: PreTrainedModel, watch: RungWatch) -> None:
    """A kept prefix is precise, with which the longest request has no room; nobody else gives pages back."""
    store = PrefixStore(model, rung_config(NAMED), device_bytes=1 << 20)
    manager = model.init_continuous_batching(request_config(NAMED, 100_000), chunks(1024))
    ids = prompts((manager.memory().longest - 4,))[0]
    manager.stop()
    assert store.prefill(ids[:200])
    manager.use_prefixes(store)
    manager.start()
    manager.add_request(ids, request_id="alone", max_new_tokens=5)
    done = collect(manager, {"alone"})["alone"]
    manager.stop()
    assert done.error is None and len(done.generated_tokens) == 5
    assert max(watch.bytes) <= 100_000
    watch.assert_nothing_left()


@pytest.mark.parametrize("rungs", RUNGS)
def test_shared_beginnings_keep_their_pages(rungs: str, model: PreTrainedModel, watch: RungWatch) -> None:
    """Requests that begin alike share pages in every part, are not lowered there, and say what they would alone."""
    named, new = RUNGS[rungs][0], 8
    system, *tails = prompts((128, 9, 11, 13))
    store = PrefixStore(model, rung_config(named), device_bytes=1 << 20)
    manager = model.init_continuous_batching(request_config(named, 600_000, max_new_tokens=new), chunks(512))
    manager.use_prefixes(store)
    shared = []
    load = Slots.load

    def watched(slots: Slots, slot: int, sources: Any, tokens: int, alike: int | None = None) -> None:
        before = slots.used_pages
        load(slots, slot, sources, tokens, alike)
        shared.append([part.held(slot) for part in slots.parts] - (slots.used_pages - before))

    watch.monkeypatch.setattr(Slots, "load", watched)
    manager.start()
    collect(manager, {manager.add_request(system, request_id="first", max_new_tokens=1)})
    given = {f"chat {i}": system + tail for i, tail in enumerate(tails)}
    for name, ids in given.items():
        manager.add_request(ids, request_id=name)
    outputs = collect(manager, set(given))
    manager.stop()
    # the first one has nobody beside it
    assert len(shared) == len(tails) and (np.stack(shared)[1:] > 0).all()
    model.set_attn_implementation("diffkv")
    for name, ids in given.items():
        cache = DiffKVCache(model.config, at_first(rungs))
        with torch.no_grad():
            model(torch.tensor([system]), **passing(cache))
        assert outputs[name].generated_tokens == expected(model, ids, new, **passing(cache))
    watch.assert_nothing_left()


def test_a_measured_model_is_served_with_the_rungs_of_its_table(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path))
    lookup.keep(measured(model))
    fields = {"target_ratio": 0.27, "max_bytes": 200_000, "window": 8, "page_bytes": 512}
    table = DiffKVConfig.for_model(model, **fields, until_full="K8V8")
    manager = DiffKVBatchingManager(
        model, {**fields, "until_full": "K8V8"}, model.generation_config, ContinuousBatchingConfig()
    )
    slots = manager._cache.slots
    layers = layer_configs(table, 2)
    for part in slots.parts:
        for index in part.store.layers:
            assert (part.store.config.high, part.store.config.low) == (layers[index].high, layers[index].low)
    # the first head of each layer loses most
    harm = slots.parts[0].store.lowering.harm
    assert harm.shape == (1, 2, 2) and len({precision for layer in table.head_precisions for precision in layer}) > 1
    manager.stop()


def test_prefixes_of_the_final_precision_alone_are_refused(model: PreTrainedModel) -> None:
    manager = model.init_continuous_batching(request_config(NAMED, 300_000), chunks())
    with pytest.raises(ValueError, match="prefixes belong to a different model or configuration"):
        manager.use_prefixes(PrefixStore(model, FINAL, device_bytes=1 << 20))
    manager.stop()


def test_what_cannot_be_lowered_is_refused_by_name(model: PreTrainedModel) -> None:
    for fields, message in (
        ({"high": "K8V8", "low": "K8V8"}, "must need more bits than the final precision"),
        ({"head_precisions": [["K8V8", "K8V8"]] * 2}, "must need more bits than the final precision"),
        ({"head_precisions": [["K16V16", "K16V16"], ["K5V4", "K4V3"]]}, "more bits than the final precision K16V16"),
        ({"until_full": "K6V5", "head_precisions": [["K5V4", "K4V3"]] * 2}, "begins with the higher one, here K5V4"),
        ({"high": "K8V4", "low": "K4V2", "alpha_high": 1.0}, "a final precision for all tokens of a head"),
    ):
        given = {"max_bytes": "1GB", "until_full": "K8V8", **fields}
        with pytest.raises(ValueError, match=message):
            DiffKVBatchingManager(model, given, model.generation_config, ContinuousBatchingConfig())
