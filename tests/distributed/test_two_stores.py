"""A cache of several stores, as a model over several devices gives it, is no other than a cache of one store.

There is one device here, so the first half of the layers is kept from sharing a store with the second.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, Run, assert_equal_contents, contents, model_of, started, tokens
from tiny_models import ragged_prompts
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, HandOverError, PrefixStore
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.cache.stores import Stores
from hf_diffkv.compat import passing
from hf_diffkv.store import Store

LENGTHS = (90, 33, 1, 64)
LAYERS = 4
GREEDY = {"max_new_tokens": 30, "do_sample": False}

pytestmark = pytest.mark.oldest


@contextmanager
def two_stores(devices: bool = False) -> Iterator[None]:
    """New caches get a store per half of the layers; with `devices` each has a device's budget for itself."""
    fits = Stores._fits

    def split(self: Stores, store: Store, *wanted: Any) -> bool:
        # layers come in order, so the next one is as many as there are
        half = len(self._places) < self.num_layers // 2
        mine = [index for index, (place, _) in self._places.items() if place is store]
        return fits(self, store, *wanted) and all((index < self.num_layers // 2) == half for index in mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stores, "_fits", split)
        if devices:
            patch.setattr(Stores, "_on", lambda self, device: [])
            patch.setattr(Stores, "_layers_to_come", lambda self, *wanted: self.num_layers // 2)
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of(num_hidden_layers=LAYERS)


def pair(model: PreTrainedModel, config: DiffKVConfig = CONFIG) -> tuple[Run, Run]:
    """Runs a prompt in a cache of two stores and in a cache of one store."""
    with two_stores():
        split = started(model, LENGTHS, config)
    one = started(model, LENGTHS, config)
    assert [len(run.cache.stores.all) for run in (split, one)] == [2, 1]
    return split, one


def go_on(split: Run, one: Run, seed: int = 0) -> None:
    """Steps, a turn with padding, and steps again, the same in both."""
    batch = one.ids.shape[0]
    for ids in (tokens(batch, 12, seed), tokens(batch, 5, seed + 1)):
        assert torch.equal(split.steps(ids), one.steps(ids))
        more = ragged_prompts((3, 7, 0, 12)[:batch], seed)
        assert torch.equal(split.feed(*more), one.feed(*more))
    assert_equal_contents(split.cache, one.cache)
    assert min(one.cache.memory().tokens.values()) > 20


@pytest.mark.sampled(100)
def test_turns_and_steps(model: PreTrainedModel) -> None:
    split, one = pair(model, DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16))
    go_on(split, one)
    # what was held for the layers of the other store is given back
    assert [store.num_layers for store in split.cache.stores.all] == [2, 2]
    assert sum(store.window_key.numel() for store in split.cache.stores.all) == (
        one.cache.stores.all[0].window_key.numel()
    )
    for each in (split, one):
        each.cache.reset()
        each.ids = each.mask = torch.zeros(4, 0, dtype=torch.int64)
    with two_stores():
        split.feed(*ragged_prompts(LENGTHS))
    one.feed(*ragged_prompts(LENGTHS))
    go_on(split, one, seed=5)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beam", "lookup"]
)
@pytest.mark.sampled(100)
def test_generate(model: PreTrainedModel, options: dict[str, Any]) -> None:
    ids, mask = ragged_prompts(LENGTHS if "prompt_lookup_num_tokens" not in options else (90,))

    def generate(cache: Any, attention: str = "diffkv") -> torch.Tensor:
        model.set_attn_implementation(attention)
        return model.generate(ids, attention_mask=mask, **passing(cache), **GREEDY, **options)

    with two_stores():
        split, lossless = DiffKVCache(model.config, CONFIG), DiffKVCache(model.config, DiffKVConfig.lossless())
        found, exact = generate(split), generate(lossless)
    one = DiffKVCache(model.config, CONFIG)
    assert torch.equal(found, generate(one))
    assert_equal_contents(split, one)
    assert torch.equal(exact, generate(DynamicCache(config=model.config), "sdpa"))
    assert len(split.stores.all) == len(lossless.stores.all) == 2
    model.set_attn_implementation("diffkv")


@pytest.mark.parametrize(
    "choose",
    [
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0, 3])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True, False])),
    ],
    ids=["reorder", "repeat", "select"],
)
@pytest.mark.sampled(100)
def test_rows(model: PreTrainedModel, choose: Callable) -> None:
    split, one = pair(model)
    index = torch.arange(4)
    for run in (split, one):
        run.steps(tokens(4, 10))
        choose(run.cache)
        index = run.cache.batch_size
    assert_equal_contents(split.cache, one.cache)
    for run in (split, one):
        run.ids, run.mask = run.ids[:1].repeat(index, 1), run.mask[:1].repeat(index, 1)
        run.mask[:] = run.cache.levels(0)[:, 0] >= 0
    ids = tokens(index, 20)
    assert torch.equal(split.steps(ids), one.steps(ids))
    assert_equal_contents(split.cache, one.cache)


def test_tokens_taken_back(model: PreTrainedModel) -> None:
    split, one = pair(model)
    for run in (split, one):
        run.cache.activate_past_recording()
    for seed, (count, rejected) in enumerate([(5, 2), (1, 0), (3, 3), (2, 1), (30, 4)]):
        assert torch.equal(split.feed(tokens(4, count, seed)), one.feed(tokens(4, count, seed)))
        assert_equal_contents(split.cache, one.cache)
        split.crop(rejected)
        one.crop(rejected)
        assert_equal_contents(split.cache, one.cache)
    with pytest.raises(ValueError, match="can be rolled back"):
        split.crop(1000)
    assert_equal_contents(split.cache, one.cache)


@pytest.mark.parametrize(
    "duplicate",
    [lambda cache: cache.fork(1)[0], copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["fork", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("steps", [0, 11])
@pytest.mark.sampled(100)
def test_copies(model: PreTrainedModel, duplicate: Callable, steps: int) -> None:
    split, one = pair(model)
    if steps:
        split.steps(tokens(4, steps))
        one.steps(tokens(4, steps))
    twin, other = split.on(duplicate(split.cache)), one.on(copy.deepcopy(one.cache))
    before = contents(split.cache)
    go_on(twin, other)
    assert all(torch.equal(*both) for both in zip(before, contents(split.cache)))
    go_on(split, one, seed=7)


@pytest.mark.parametrize("saved, loaded", [(2, 1), (2, 2), (1, 2)])
@pytest.mark.sampled(100)
def test_saved_and_loaded_on_other_devices(
    model: PreTrainedModel, saved: int, loaded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of one store is split where its layers are to stand on two devices (here two names of the same)."""
    split, one = pair(model)
    run = split if saved == 2 else one
    run.steps(tokens(4, 10))
    run.cache.save_pretrained(tmp_path, model)
    if loaded == 2:
        devices = {0: torch.device("cpu"), 1: torch.device("cpu"), 2: torch.device("cpu:0"), 3: torch.device("cpu:0")}
        monkeypatch.setattr("hf_diffkv.cache.diffkv_cache.layer_devices", lambda model: devices)
    again = run.on(DiffKVCache.from_pretrained(tmp_path, model))
    assert len(again.cache.stores.all) == max(saved, loaded)
    assert_equal_contents(again.cache, run.cache)
    go_on(again, run)


def test_a_prefix_kept_for_two_devices(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_stores():
        run = started(model, (90,))
    devices = {0: torch.device("cpu"), 1: torch.device("cpu"), 2: torch.device("cpu:0"), 3: torch.device("cpu:0")}
    monkeypatch.setattr("hf_diffkv.prefixes.store.layer_devices", lambda model: devices)
    store = PrefixStore(model, CONFIG)
    assert store.insert(run.ids, run.cache)
    again = run.on(store.lookup(torch.cat([run.ids, tokens(1, 1)], 1)))
    assert len(again.cache.stores.all) == 2
    assert_equal_contents(again.cache, run.cache)
    go_on(again, run)


@pytest.mark.parametrize("max_bytes", [250_000, 400_000])
@pytest.mark.slow
def test_stores_of_one_device_share_its_budget(model: PreTrainedModel, max_bytes: int) -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.0, window=16, page_bytes=512, max_bytes=max_bytes)
    sizes = []
    with two_stores():
        run = started(model, LENGTHS, config)
        for seed in range(4):
            for step in tokens(4, 25, seed).split(1, dim=1):
                run.feed(step)
                sizes.append(run.cache.memory().bytes)
            run.feed(*ragged_prompts((3, 30, 0, 12), seed))
            sizes.append(run.cache.memory().bytes)
    assert max(sizes) <= max_bytes
    assert sizes[-1] > 0.75 * max_bytes, "most of the budget is used"
    run.cache.check_integrity()
    kept = [sum(layer.high) + sum(layer.low) for layer in run.cache.memory().layers]
    assert min(kept) > 0.3 * max(kept), f"one store starves: {kept}"


def test_a_budget_for_each_device(model: PreTrainedModel) -> None:
    """Layers that are known to be elsewhere take nothing of a device's budget: its layers prune as if alone."""
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.0, window=16, page_bytes=512, max_bytes=120_000)
    with two_stores(devices=True):
        run = started(model, LENGTHS, config)
        for step in tokens(4, 40).split(1, dim=1):
            run.feed(step)
            held = [store.bytes for store in run.cache.stores.all]
            assert max(held) <= 120_000
    assert min(held) > 0.75 * 120_000, f"most of each budget is used: {held}"
    assert run.cache.memory().bytes == sum(held)


def test_a_budget_that_one_device_cannot_keep(model: PreTrainedModel) -> None:
    """The second store finds no room for a step: nothing has changed in the first one either."""
    split, one = pair(model, DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16, page_bytes=512))
    for run in (split, one):
        run.steps(tokens(4, 8))
    store = split.cache.stores.all[1]
    unlimited = store.config
    store.config = DiffKVConfig(alpha_high=1.0, window=16, page_bytes=512, max_bytes=20_000)
    assert store.look_due
    for _ in range(2):
        with pytest.raises(MemoryError, match="max_bytes=20000"):
            split.feed(tokens(4, 1, 3))
        assert_equal_contents(split.cache, one.cache)
        with pytest.raises(MemoryError, match="max_bytes=20000"):
            split.cache.batch_repeat_interleave(2)
        assert_equal_contents(split.cache, one.cache)
        split.ids, split.mask = one.ids, one.mask
    store.config = unlimited
    go_on(split, one)


@pytest.mark.sampled(100)
def test_a_step_that_fails_in_its_first_layer(model: PreTrainedModel) -> None:
    split, one = pair(model, DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16))
    for run in (split, one):
        run.steps(tokens(4, 10))

    def fails(*args: Any) -> None:
        raise RuntimeError("no attention")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no attention"):
        patch.setattr(DiffKVLayer, "_attend", fails)
        split.feed(tokens(4, 1))
    assert_equal_contents(split.cache, one.cache)
    go_on(split, one)


@pytest.mark.parametrize("count", [1, 5], ids=["step", "turn"])
@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.sampled(100)
def test_an_interrupt_between_two_layers(model: PreTrainedModel, layer: int, count: int, first: bool) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with two_stores():
        cache = DiffKVCache(model.config, CONFIG)
        run = Run(model, cache, 4) if first else started(model, LENGTHS, cache=cache)
        hook = model.model.layers[layer].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.feed(tokens(4, count))
        hook.remove()
        for _ in range(2):
            with pytest.raises(HandOverError, match=r"reset\(\)"):
                run.feed(tokens(4, count))
        cache.check_integrity()
        cache.reset()
        again = started(model, LENGTHS, cache=cache)
    go_on(again, started(model, LENGTHS))
