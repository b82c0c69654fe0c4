"""Prefixes that come back from a store go on as if they had never been away, and the longest one is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, Run, assert_equal_contents, model_of, started, tokens
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, PrefixStore
from hf_diffkv.compat import passing
from hf_diffkv.prefixes import content as content_module
from hf_diffkv.prefixes import tokens as tokens_module
from hf_diffkv.prefixes.tiers import MemoryTier


@contextmanager
def computed_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Tokens of every forward."""
    counts: list[int] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        counts.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield counts
    handle.remove()


def answer(model: PreTrainedModel, ids: Tensor, cache: DiffKVCache) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=8, do_sample=False)


# a model whose other layer holds states of several kinds
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


@pytest.mark.parametrize(
    "name, on_disk", [("llama", False), ("llama", True), ("gemma2", True), ("qwen3_next", False), ("qwen3_next", True)]
)
@pytest.mark.sampled(100)
def test_turns_equal_those_on_one_cache(name: str, on_disk: bool, tmp_path: Path) -> None:
    """Compares turns with those on one cache. On disk, every turn has a store of its own, as after a restart."""
    # the experts of that model know no float64
    model = model_of(name) if name != "qwen3_next" else model_of(name, **HYBRID).float()
    options = {"device_bytes": 0, "folder": tmp_path} if on_disk else {}
    store = PrefixStore(model, CONFIG, **options)
    one = DiffKVCache(model.config, CONFIG)
    ids, seen = torch.zeros(1, 0, dtype=torch.int64), 0
    for turn, new in enumerate((60, 1, 25)):
        ids = torch.cat([ids, tokens(1, new, turn)], 1)
        expected = answer(model, ids, one)
        store = PrefixStore(model, CONFIG, **options) if on_disk else store
        cache = store.lookup(ids)
        assert cache.get_seq_length() == seen
        with computed_tokens(model) as counts:
            assert torch.equal(answer(model, ids, cache), expected)
        assert counts == [ids.shape[1] - seen, *[1] * 7]
        assert_equal_contents(cache, one)
        assert store.insert(expected, cache)
        assert turn < 2 or torch.equal(answer(model, ids, store.lookup(ids)), expected), "a prefix has changed"
        ids, seen = expected, expected.shape[1] - 1
    assert store.stats.tokens_reused == (76 + 76 if on_disk else 67 + 76 + 76)
    assert [entry.tokens for entry in store] == [76, 109, 67], "the last used first"


def test_a_stored_prefix_is_not_changed_by_those_who_go_on_from_it() -> None:
    model = model_of()
    store, run = PrefixStore(model, CONFIG), started(model, (50,))
    expected = started(model, (50,)).cache
    assert store.insert(run.ids, run.cache)
    run.steps(tokens(1, 5))
    more = torch.cat([run.ids[:, :50], tokens(1, 3, 9)], 1)
    for _ in range(2):
        fork = run.on(store.lookup(more))
        assert_equal_contents(fork.cache, expected)
        fork.steps(tokens(1, 3))


def test_a_marked_boundary() -> None:
    """A system prompt computed once: requests equal those whose prompt came in two parts."""
    model = model_of()
    store, system = PrefixStore(model, CONFIG), tokens(1, 40)
    assert store.prefill(system) and store.prefill(system[0, :20]) and system in store
    with computed_tokens(model) as counts:
        assert store.prefill(system)
    assert not counts and store.stats.lookups == 2
    for seed in range(2):
        question = tokens(1, 7, 5 + seed)
        cache = store.lookup(torch.cat([system, question], 1))
        parts = Run(model, DiffKVCache(model.config, CONFIG))
        parts.feed(system)
        continued = parts.on(cache)
        assert torch.equal(continued.feed(question), parts.feed(question))
        assert_equal_contents(continued.cache, parts.cache)


@pytest.fixture(scope="module")
def small() -> tuple[PreTrainedModel, list[DiffKVCache]]:
    """A model of one layer, and a cache of every length up to 12; which tokens they saw does not matter."""
    model = model_of(num_hidden_layers=1)
    return model, [started(model, (length,)).cache for length in range(1, 13)]


@pytest.mark.parametrize("collisions", [False, True])
def test_the_longest_prefix_is_found(
    small: tuple[PreTrainedModel, list[DiffKVCache]], collisions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a plain dictionary; with a hash that is the same for all, no wrong prefix is taken for the right one."""
    model, caches = small
    if collisions:
        for module in (content_module, tokens_module):
            monkeypatch.setattr(module, "digests", lambda ids, lengths: dict.fromkeys(lengths, 32 * "0"))
    store, held = PrefixStore(model, CONFIG), {}
    draw = random.Random(0)
    for _ in range(200):
        ids = tuple(draw.choices((3, 4), k=draw.randint(1, 12)))
        if draw.random() < 0.3:
            store.insert(ids, caches[len(ids) - 1])
            if not (collisions and len(ids) in map(len, held)):
                held[ids] = None
        elif draw.random() < 0.02:
            store.clear()
            held.clear()
        else:
            expected = max((len(prefix) for prefix in held if ids[: len(prefix)] == prefix != ids), default=0)
            cache = store.lookup(torch.tensor(ids))
            assert cache.get_seq_length() == expected
        assert len(store) == len(held)
    assert sorted(entry.tokens for entry in store) == sorted(map(len, held))
    assert store.stats.hits["device"] > 30


CALLS = {
    "rows": (lambda store, cache: store.lookup(torch.zeros(2, 5).long()), "one request at a time"),
    "floats": (lambda store, cache: store.lookup(torch.zeros(5)), "input_ids is torch.float32"),
    "announced rows": (lambda store, cache: store.look_ahead([torch.zeros(2, 5).long()]), "prompts has 2 rows"),
    "too few ids": (lambda store, cache: store.insert(tokens(1, 19), cache), "19 tokens but the cache holds 20"),
    "no cache": (lambda store, cache: store.insert(tokens(1, 19), None), "cache is a NoneType"),
    "nothing to compute": (lambda store, cache: store.prefill([]), "torch.float32|no tokens"),
    "no folder": (lambda store, cache: store.save(), "has no folder"),
    "limit": (lambda store, cache: PrefixStore(store.model, host_bytes=-1), "host_bytes=-1"),
    "no limit": (lambda store, cache: PrefixStore(store.model, device_bytes=None), "device_bytes=None"),
    "limit of what": (lambda store, cache: PrefixStore(store.model, folder_bytes=5), "without folder"),
    "offloaded": (lambda store, cache: PrefixStore(model_of().to("meta")), "is offloaded"),
    "no model": (lambda store, cache: PrefixStore(store.model.config), "pass the model itself"),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name: str) -> None:
    call, words = CALLS[name]
    model = model_of()
    store, cache = PrefixStore(model, CONFIG), started(model, (20,)).cache
    with pytest.raises(ValueError, match=words):
        call(store, cache)
    assert len(store) == 0 and store.stats.lookups == 0


def test_a_model_that_was_changed_needs_a_new_store() -> None:
    model = model_of()
    store, ids = PrefixStore(model, CONFIG), tokens(1, 40)
    store.prefill(ids)
    model.to(torch.bfloat16)
    longer = torch.cat([ids, tokens(1, 3)], 1)
    with pytest.raises(ValueError, match="torch.bfloat16.* a new PrefixStore"):
        answer(model, longer, store.lookup(longer))


def test_caches_that_are_not_stored() -> None:
    model = model_of()
    store, ids = PrefixStore(model, CONFIG), tokens(1, 40)
    padded = started(model, (20, 7))
    rejected = started(model, (20,))
    rejected.cache.activate_past_recording()
    rejected.feed(tokens(1, 2))
    halves = started(model, (20, 7))
    halves.select([1])
    other = started(model, (20,), DiffKVConfig.lossless())
    for cache, words in (
        (padded.cache, "several requests"),
        (halves.cache, "padding"),
        (rejected.cache, r"crop\(0\)"),
        (other.cache, "another model or configuration"),
        (started(model_of("qwen3"), (20,)).cache, "another model or configuration"),
    ):
        with pytest.raises(ValueError, match=words):
            store.insert(ids, cache)
    assert len(store) == 0
    assert not store.insert(ids, DiffKVCache(model.config, CONFIG)), "there is nothing in it"
    rejected.crop(1)
    assert store.insert(rejected.ids, rejected.cache)
    assert_equal_contents(store.lookup(torch.cat([rejected.ids, ids], 1)), rejected.cache)


def test_other_tokens_than_the_cache_holds_are_not_stored() -> None:
    """A text that was decoded and tokenised again can have other ids."""
    model, ids = model_of(), tokens(1, 20)
    store = PrefixStore(model, CONFIG)
    cache = store.lookup(ids)
    output = model.generate(ids, **passing(cache), max_new_tokens=3, do_sample=False)
    other = output.clone()
    other[0, 12] += 1
    with pytest.raises(ValueError, match="differ from position 12"):
        store.insert(other, cache)
    assert len(store) == 0 and store.insert(output, cache)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_prefix_that_was_interrupted_on_its_way_can_be_stored_again(
    on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(model_of(), (60,))
    store = PrefixStore(run.model, CONFIG, folder=tmp_path if on_disk else None)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MemoryTier, "put", interrupted)
        store.insert(run.ids, run.cache)
    assert len(store) == 0 and run.ids not in store
    assert store.insert(run.ids, run.cache)
    assert store.lookup(torch.cat([run.ids, tokens(1, 1)], 1)).get_seq_length() == 60


def test_seconds_saved() -> None:
    model = model_of()
    store, run = PrefixStore(model, CONFIG), started(model, (50,))
    store.insert(run.ids, run.cache)
    store.lookup(torch.cat([run.ids, tokens(1, 3)], 1))
    assert store.stats.seconds_saved is None
    before = torch.get_rng_state()
    speed = store.measure(60)
    stats = store.stats
    assert torch.equal(torch.get_rng_state(), before)
    assert speed > 0 and stats.lookup_seconds > 0
    assert stats.seconds_saved == 50 * speed - stats.lookup_seconds
    assert (stats.lookups, stats.tokens, stats.tokens_reused) == (1, 53, 50)
    assert str(stats).startswith("1 lookups, hits: 1 device; 50 of 53 prompt tokens reused (94%); ")


def test_only_the_thread_needs_the_serving_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    model = model_of()
    store, run = PrefixStore(model, CONFIG), started(model, (20,))
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="hf_diffkv_serving is not installed: pip"):
        patch.setattr("importlib.import_module", missing)
        store.start()
    store.insert(run.ids, run.cache)
    (found,) = store.look_ahead([torch.cat([run.ids, tokens(1, 3)], 1)])
    assert (found.tier, found.loading, found.tokens) == ("device", False, 20)
    store.flush()
    store.stop()
    assert store.stats.loaded_ahead == store.stats.offloaded == 0


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_hit_is_repeated_for_beams(name: str, options: dict) -> None:
    """Compares with `DynamicCache`; other tokens than the stored ones are refused before anything is repeated."""
    model, ids = model_of(name), tokens(1, 60)
    store = PrefixStore(model, DiffKVConfig.lossless(window=8))
    store.prefill(ids[:, :40])
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    cache = store.lookup(ids)
    with pytest.raises(ValueError, match="differ from position 0"):
        model.generate(ids.roll(1), **passing(cache), **options)
    assert cache.get_seq_length() == 40 and cache.rows() == 1

    def said(cache: Cache) -> Tensor:
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **passing(cache), **options)

    with computed_tokens(model) as counts:
        given = said(cache)
    assert counts[0] == 20 and cache.rows() == 3
    model.set_attn_implementation("eager")
    assert torch.equal(given, said(DynamicCache(config=model.config)))
