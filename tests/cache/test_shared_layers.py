"""Families whose later layers read the keys and values of an earlier layer, which is compressed for all of them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SLIDING_LAYERS_RECORD, Run, assert_close_contents, assert_equal_contents, started, tokens
from simulated_attention import simulated
from test_compressed_models import assert_generates_as_simulated, assert_same, generate
from tiny_models import ragged_prompts, tiny_model
from transformers import DynamicCache, PreTrainedModel, cache_utils

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache import devices
from hf_diffkv.cache.attention import diffkv_attention
from hf_diffkv.cache.errors import HandOverError, NotCapturableError
from hf_diffkv.cache.graphs import GRAPH_TYPES, wants_graphs
from hf_diffkv.compat import passing
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import prompt as store_prompt

pytestmark = pytest.mark.oldest
LENGTHS = (130, 1, 77)
CONFIG = DiffKVConfig(alpha_high=1.6, alpha_low=0.8, window=16)
LOSSLESS = DiffKVConfig.lossless(window=16)
# layer 3 is read by 5 and 7
READ, LAST = 3, 7
SHARING: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "sliding_window": 24,
    "num_kv_shared_layers": 4,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
OPTIONS = {
    "gemma3n_text": {**SHARING, "laurel_rank": 8, "activation_sparsity_pattern": None},
    "gemma4_text": {**SHARING, "global_head_dim": 16},
}
both = pytest.mark.parametrize("name", OPTIONS)


def model_of(name: str = "gemma4_text", attention: str = "diffkv", **options: Any) -> PreTrainedModel:
    return tiny_model(name, attention, dtype=torch.float64, **{**OPTIONS[name], **options})


def attention_of(model: PreTrainedModel, layer_idx: int) -> torch.nn.Module:
    return model.model.layers[layer_idx].self_attn


@both
@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.sampled(100)
def test_generation_equals_the_simulation(name: str, chunk: int | None) -> None:
    """Three layers share significance; newer releases run two of them only on a prompt's last token."""
    model, prompts = model_of(name, "eager"), ragged_prompts(LENGTHS)
    options = {"prefill_chunk_size": chunk}
    cache, expected = assert_generates_as_simulated(model, CONFIG, prompts, 40, least=8, **options)
    assert cache.compressed_layers() == [1, READ]
    exact, _ = generate(model, DynamicCache(config=model.config), *prompts, 40, **options)
    assert not torch.equal(exact, expected), "compression changed nothing, so this comparison proves nothing"


@both
@pytest.mark.slow
def test_lossless_generation_equals_a_dynamic_cache(name: str) -> None:
    model = model_of(name, "sdpa")
    ids, mask = ragged_prompts(LENGTHS)
    for options in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        rows = slice(0, 1 if "prompt_lookup_num_tokens" in options else None)
        results = []
        for cache in (DynamicCache(config=model.config), DiffKVCache(model.config, LOSSLESS)):
            inputs = {"attention_mask": mask[rows], **passing(cache), "do_sample": False}
            results.append(model.generate(ids[rows], max_new_tokens=16, **inputs, **options))
        assert torch.equal(*results)


def test_hidden_tokens_equal_the_simulation() -> None:
    model = model_of(attention="eager")
    with simulated(model, CONFIG) as simulation:
        expected = started(model, LENGTHS, cache=DynamicCache(config=model.config))
        expected.mask[0, 20:90] = 0
        for layer in simulation.layers.values():
            layer.hide(expected.mask.bool())
        wanted = expected.feed(tokens(3, 3)), expected.steps(tokens(3, 6))
    model.set_attn_implementation("diffkv")
    run = started(model, LENGTHS, CONFIG)
    run.mask[0, 20:90] = 0
    given = run.feed(tokens(3, 3)), run.steps(tokens(3, 6))
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
    for layer_idx, layer in simulation.layers.items():
        assert torch.equal(run.cache.levels(layer_idx), layer.levels())


@both
@pytest.mark.parametrize("newest", [0, 2])
@pytest.mark.sampled(100)
def test_tokens_taken_back(name: str, newest: int) -> None:
    """Compares with a forward of the remaining tokens. `newest` is the number of tokens with logits, 0 for all."""
    model = model_of(name)
    run, plain = started(model, LENGTHS, CONFIG), started(model, LENGTHS, CONFIG)
    run.cache.activate_past_recording()
    for seed, (count, rejected) in enumerate(((6, 1), (1, 0), (4, 1), (9, 1))):
        ids = tokens(3, count, seed)
        run.model = functools.partial(model, logits_to_keep=newest)
        plain.model = functools.partial(model, logits_to_keep=newest and newest - rejected)
        given = run.feed(ids)
        run.crop(rejected)
        wanted = plain.feed(ids[:, : count - rejected])
        torch.testing.assert_close(given[:, : given.shape[1] - rejected], wanted)
        assert_close_contents(run.cache, plain.cache)
    assert min(run.cache.memory().tokens.values()) > 8


def test_requests_are_chosen_and_repeated() -> None:
    model, order = model_of(), [2, 0, 0]
    ids, mask = ragged_prompts(LENGTHS)
    run, alone = started(model, LENGTHS, CONFIG), Run(model, DiffKVCache(model.config, CONFIG), 3)
    run.select(order)
    alone.feed(ids[order], mask[order])
    torch.testing.assert_close(run.steps(tokens(3, 5)), alone.steps(tokens(3, 5)))
    assert_close_contents(run.cache, alone.cache)
    run.cache.activate_past_recording()
    run.feed(tokens(3, 4, seed=2))
    run.cache.reorder_cache(torch.tensor([1, 1, 0]))
    run.crop(1)
    alone.feed(tokens(3, 4, seed=2)[:, :3])
    alone.select([1, 1, 0])
    assert_close_contents(run.cache, alone.cache)


def test_copies_go_on_alike(tmp_path: Path) -> None:
    model = model_of()
    run = started(model, LENGTHS, CONFIG)
    run.steps(tokens(3, 5))
    run.cache.save_pretrained(tmp_path, model)
    loaded = DiffKVCache.from_pretrained(tmp_path, model)
    others = [run.on(cache) for cache in (*run.cache.fork(1), copy.deepcopy(run.cache), loaded)]
    wanted = torch.cat([run.steps(tokens(3, 4)), run.feed(tokens(3, 9)), run.steps(tokens(3, 2))], 1)
    for other in others:
        given = torch.cat([other.steps(tokens(3, 4)), other.feed(tokens(3, 9)), other.steps(tokens(3, 2))], 1)
        assert torch.equal(given, wanted)
        assert_equal_contents(other.cache, run.cache)


@pytest.mark.slow
def test_compiled_steps_equal_eager_ones() -> None:
    torch._dynamo.reset()
    fewer = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SHARING["layer_types"][:4]}
    model = model_of("gemma4_text", **fewer)
    eager, compiled = started(model, LENGTHS, CONFIG), started(model, LENGTHS, CONFIG)
    compiled.model = torch.compile(model, fullgraph=True, backend="aot_eager")
    if not hasattr(cache_utils, "KVSharingDict"):
        with pytest.raises(Exception, match="upgrade transformers, or compile without fullgraph"):
            compiled.feed(tokens(3, 1))
        assert compiled.cache.get_seq_length() == max(LENGTHS)
        return
    for seed in range(4):
        step = tokens(3, 1, seed)
        torch.testing.assert_close(compiled.feed(step), eager.feed(step), rtol=1e-9, atol=1e-9)
    assert_close_contents(compiled.cache, eager.cache)


def test_the_read_layer_takes_less_memory() -> None:
    model = model_of()
    run = started(model, (600,), DiffKVConfig(alpha_high=4.0, alpha_low=2.0, window=16))
    report = run.cache.memory()
    of_each = 600 * 2 * 2 * 16 * 8  # tokens, heads, keys and values, elements, bytes
    assert report.compressed_dense_bytes == 2 * of_each and report.compressed_ratio < 0.5
    assert report.layers[1].layer_idx == READ and sum(report.layers[1].pruned) > 100


def test_a_budget_is_kept() -> None:
    model = model_of()
    free = started(model, LENGTHS, CONFIG)
    limit = free.cache.memory().compressed_bytes
    run = started(model, LENGTHS, DiffKVConfig(alpha_high=0.0, window=16, max_bytes=limit, until_full=None))
    run.steps(tokens(3, 10))
    run.feed(tokens(3, 30))
    assert run.cache.memory().compressed_bytes <= limit
    run.cache.check_integrity()
    assert all(sum(layer.pruned) for layer in run.cache.memory().layers)


@pytest.mark.skipif(not SLIDING_LAYERS_RECORD, reason="Transformers' own sliding layers do not")
@pytest.mark.parametrize("more", range(2_000, 40_000, 4_000))
def test_a_budget_is_kept_while_recording(more: int) -> None:
    """The reading layers' queries are held too; room for all is made before the first layer records."""
    model = model_of()
    limit = started(model, LENGTHS, LOSSLESS).cache.memory().compressed_bytes + more
    run = started(model, LENGTHS, DiffKVConfig(high="K5V4", low="K5V4", window=16, sinks=0, max_bytes=limit))
    run.cache.activate_past_recording()
    with pytest.raises(MemoryError, match="max_bytes"):
        for seed in range(200):
            run.feed(tokens(3, 4, seed))
            assert run.cache.memory().compressed_bytes <= limit
    run.cache.check_integrity()
    run.crop(4)
    run.feed(tokens(3, 1))


class Stop(Exception):
    """Raised in the middle of a forward."""


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.sampled(100)
def test_an_abandoned_forward_is_noticed(count: int) -> None:
    model = model_of()
    run = started(model, LENGTHS, CONFIG)

    def stop(*_: Any) -> None:
        with pytest.raises(HandOverError, match="in progress"):
            run.cache.levels(READ)
        raise Stop

    hook = attention_of(model, LAST).register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        run.feed(tokens(3, count))
    hook.remove()
    # a mask that leaves out that forward's tokens is refused before the layers are asked
    with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
        run.feed(tokens(3, 1))
    run.ids, run.mask = (torch.cat([each, torch.ones_like(tokens(3, count))], 1) for each in (run.ids, run.mask))
    for use in (lambda: run.feed(tokens(3, 1)), lambda: run.cache.fork(1), lambda: run.cache.crop(0)):
        with pytest.raises(HandOverError, match=r"not all layers that share.*reset\(\)"):
            use()
    run.cache.reset()
    again = run.on(run.cache)
    again.ids = again.mask = torch.zeros(3, 0, dtype=torch.int64)
    again.feed(*ragged_prompts(LENGTHS))
    assert_equal_contents(run.cache, started(model, LENGTHS, CONFIG).cache)


@pytest.mark.parametrize("said, error", [(1, "more layers share"), (3, "not all layers that share")])
def test_another_number_of_readers_is_noticed(said: int, error: str) -> None:
    model = model_of()
    cache = DiffKVCache(model.config, CONFIG)
    cache.layers[READ].readers = said
    with pytest.raises(HandOverError, match=error):
        run = started(model, LENGTHS, cache=cache)
        run.feed(tokens(3, 1))


def test_a_reader_with_another_mask_is_noticed() -> None:
    model = model_of()
    run = started(model, LENGTHS, CONFIG)

    def other_mask(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., 125] = False
        return args, {**kwargs, "attention_mask": mask}

    hook = attention_of(model, LAST).register_forward_pre_hook(other_mask, with_kwargs=True)
    with pytest.raises(HandOverError, match="different attention mask"):
        run.feed(tokens(3, 2))
    hook.remove()
    with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
        run.feed(tokens(3, 1))


def test_a_reader_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    run = started(model, LENGTHS, CONFIG)
    compress, calls = store_prompt.compress, []

    def failing(*arguments: Any) -> Any:
        calls.append(None)
        # the first one is from a layer that is not shared
        if len(calls) > 1:
            raise MemoryError("full")
        return compress(*arguments)

    monkeypatch.setattr(store_prompt, "compress", failing)
    with pytest.raises(MemoryError, match="full"):
        run.feed(tokens(3, 5))
    monkeypatch.undo()
    with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
        run.feed(tokens(3, 5))


def test_readers_on_another_device_keep_the_layer_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_actual", lambda device: device)
    model, ids = model_of(attention="sdpa"), ragged_prompts(LENGTHS)
    places = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{index}": int(index > 5) for index in range(8)}
    expected = generate(model, DynamicCache(config=model.config), *ids, 8)
    cache = DiffKVCache(model.config, LOSSLESS)
    model.hf_device_map = places
    try:
        cache.attach(model)
    finally:
        del model.hf_device_map
    assert cache.compressed_layers() == [1]
    assert_same(generate(model, cache, *ids, 8), expected)
    assert cache.get_seq_length() == 137
    cache.check_integrity()
    same = DiffKVCache(model.config, LOSSLESS)
    model.hf_device_map = {**places, **{f"model.layers.{index}": int(index > 0) for index in range(8)}}
    same.attach(model)
    assert same.compressed_layers() == [1, READ]


def test_keys_that_were_moved_to_another_device_are_noticed() -> None:
    """Copies carry no layer, so the reader would only see the new tokens."""
    model = model_of()
    cache = DiffKVCache(model.config, CONFIG)
    seen = []

    def moved(*_: Any) -> None:
        key = torch.empty(cache.layers[READ].awaited.shape, device="meta")
        with pytest.raises(HandOverError, match="different devices"):
            diffkv_attention(attention_of(model, LAST), key, key, key, None)
        seen.append(cache.stores.broken)

    attention_of(model, LAST).register_forward_pre_hook(moved)
    with pytest.raises(HandOverError):
        started(model, LENGTHS, cache=cache)
    assert seen == [True]


def test_steps_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPH_TYPES, "cpu", object)
    model = model_of()
    cache = DiffKVCache(model.config, CONFIG)
    assert not wants_graphs(model, cache)
    new = torch.zeros(1, 2, 1, 16)
    with pytest.raises(NotCapturableError, match="later layers"):
        cache.layers[READ].attend_captured(new, new, new, None, Softmax(1.0))
