"""Every way of generating with a lossless cache of latents gives the text of `DynamicCache`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_models import LENGTHS, LOSSY, dense, latent_model, lossless, text
from runs import started, tokens
from tiny_models import greedy, ragged_prompts
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.errors import HandOverError, UnsupportedModelError
from hf_diffkv.cache.latent import LatentLayer
from hf_diffkv.compat import passing

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return latent_model()


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}],
    ids=["beams", "chunks", "prompt lookup"],
)
def test_ways_to_generate(model: PreTrainedModel, options: dict[str, Any]) -> None:
    lengths = (40,) if "prompt_lookup_num_tokens" in options else LENGTHS
    expected = greedy(model, *ragged_prompts(lengths), 8, **passing(dense(model)), **options)
    actual = greedy(model, *ragged_prompts(lengths), 8, **passing(lossless(model)), **options)
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("tokens", [2, 30])
def test_turns(model: PreTrainedModel, tokens: int) -> None:
    """A further turn's queries are absorbed if it is short, and else its past is expanded: both give the same."""
    ids = torch.randint(3, 100, (2, 30 + 5 + tokens), generator=torch.Generator().manual_seed(3))
    logits = []
    for cache in (dense(model), lossless(model)):
        if isinstance(cache, DiffKVCache):
            model.set_attn_implementation("diffkv")
        parts = [model(part, **passing(cache)).logits for part in ids.split([30, 1, 1, 3, tokens], dim=1)]
        logits.append(torch.cat(parts, dim=1))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
    assert cache.layers[0].seen == ids.shape[1]


def test_a_padded_turn(model: PreTrainedModel) -> None:
    """Padding of both turns is hidden, also where the past is expanded."""
    ids, mask = ragged_prompts((20, 9))
    more = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    more_mask = torch.ones_like(more)
    more_mask[0, :6] = 0
    whole = torch.cat([mask, more_mask], dim=1)
    logits = []
    for cache in (dense(model), lossless(model)):
        if isinstance(cache, DiffKVCache):
            model.set_attn_implementation("diffkv")
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions[:, :20], **passing(cache))
        out = model(more, attention_mask=whole, position_ids=positions[:, 20:], **passing(cache))
        logits.append(out.logits[:, 6:])
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


def test_taking_back(model: PreTrainedModel) -> None:
    """Tokens that are recorded and taken back leave no trace, and those that are kept are stored."""
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(5))
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("diffkv")
    cache = lossless(model)
    model(ids[:, :20], **passing(cache))
    cache.activate_past_recording()
    wrong = torch.randint(3, 100, (1, 4), generator=torch.Generator().manual_seed(6))
    model(torch.cat([ids[:, 20:22], wrong], dim=1), **passing(cache))
    cache.crop(-4)
    model(ids[:, 22:23], **passing(cache))
    cache.crop(0)
    logits = model(ids[:, 23:], **passing(cache)).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits, expected[:, 23:], rtol=0, atol=1e-4)
    cache.crop(0)
    cache.check_integrity()


def test_forks_copies_and_files(model: PreTrainedModel, tmp_path: Path) -> None:
    """A fork, a deep copy and a loaded cache go on like the cache itself, lossily stored as well."""
    ids, mask = ragged_prompts((40, 21))
    cache = DiffKVCache(model, LOSSY)
    first = greedy(model, ids, mask, 4, **passing(cache)).sequences
    cache.save_pretrained(tmp_path, model)
    whole = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], dim=1)
    twins = [*cache.fork(2), copy.deepcopy(cache), DiffKVCache.from_pretrained(tmp_path, model)]
    texts = [greedy(model, first, whole, 6, **passing(each)).sequences for each in (cache, *twins)]
    assert all(torch.equal(each, texts[0]) for each in texts[1:])
    for twin in twins:
        twin.check_integrity()
        assert isinstance(twin.layers[0], LatentLayer)


def test_what_layers_give_back(model: PreTrainedModel) -> None:
    """Latents and rotary keys stand where Transformers' layers have them, bit by bit if nothing is lost."""
    expected, cache = dense(model), lossless(model)
    text(model, expected), text(model, cache)
    real = ragged_prompts(LENGTHS)[1].bool()
    for ours, theirs in zip(cache.layers, expected.layers):
        for name in ("keys", "values"):
            # later tokens depend on how attention was summed
            found, dense_states = (getattr(layer, name)[:, :, : real.shape[1]] for layer in (ours, theirs))
            shown = real[:, None, :, None].expand_as(found)
            torch.testing.assert_close(found[shown], dense_states[shown], rtol=0, atol=1e-5)
    latents, rope, stored = cache.dequantize(0)
    assert latents.shape[-1] == model.config.kv_lora_rank and rope.shape[-1] == model.config.qk_rope_head_dim
    assert torch.equal(latents.to(torch.float32), cache.layers[0].keys) and stored.shape == latents.shape[:3]


def test_caches_of_both_kinds_on_one_model(model: PreTrainedModel) -> None:
    """Steps of both in turn, on the same model and attention: neither changes the other."""
    ids = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(9))
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("diffkv")
    ours, theirs = lossless(model), dense(model)
    for part in ids.split([20, 1, 1, 2], dim=1):
        last = [model(part, **passing(cache)).logits for cache in (ours, theirs)]
    model.set_attn_implementation("sdpa")
    for logits in last:
        torch.testing.assert_close(logits, expected[:, -2:], rtol=0, atol=1e-4)
    assert model(ids, **passing(dense(model))).logits.equal(expected)


def test_unregistering_takes_the_wrapper_away(model: PreTrainedModel) -> None:
    attention = type(model.model.layers[0].self_attn)
    DiffKVCache(model)
    wrapper = attention.expand_kv
    assert wrapper._diffkv
    DiffKVCache(model.config)
    assert attention.expand_kv is wrapper, "wrapped once"
    hf_diffkv.unregister()
    try:
        assert attention.expand_kv is wrapper.__wrapped__
    finally:
        hf_diffkv.register()


def test_the_models_own_attention_is_reported(model: PreTrainedModel) -> None:
    """Without "diffkv" the latents are expanded, and the cache says that nobody picked them up."""
    with pytest.raises(HandOverError, match="set_attn_implementation"):
        model(torch.tensor([[5, 6, 7]]), **passing(DiffKVCache(model.config)))


@pytest.mark.slow
def test_a_compiled_forward(model: PreTrainedModel) -> None:
    """A prompt and steps in one graph each."""
    ids = torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(2))
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("diffkv")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    cache = lossless(model)
    with torch.no_grad():
        logits = [compiled(part, **passing(cache)).logits for part in ids.split([17, 1, 1, 1], dim=1)]
    model.set_attn_implementation("sdpa")
    torch._dynamo.reset()
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=1e-4)


def test_gradients_are_refused(model: PreTrainedModel) -> None:
    model.set_attn_implementation("diffkv")
    loss = model(torch.tensor([[5, 6, 7]]), **passing(lossless(model))).logits.sum()
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="no gradient"):
        loss.backward()


UNTIL_FULL = {"high": "K8V1", "low": "K8V1", "alpha_high": 0.0, "max_bytes": "1MB", "until_full": "K6V4"}


@pytest.mark.parametrize("fields", [{"high": "K5V4"}, {"high": "K8V4", "low": "K4V4"}, UNTIL_FULL, {"preset": None}])
def test_rotary_keys_of_few_bits_are_refused(model: PreTrainedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rotary keys need at least 8 bits"):
        if "preset" in fields:
            DiffKVCache(model, DiffKVConfig.preset("balanced"))
        else:
            DiffKVCache(model, **fields)


def test_chosen_precisions(model: PreTrainedModel) -> None:
    """Presets, a ratio, and a precision for each layer."""
    names = {name: DiffKVCache(model, name).config.high.name for name in ("quality", "balanced", "small")}
    assert names == {"quality": "K8V8", "balanced": "K8V8", "small": "K8V6"}
    assert DiffKVCache(model).config.high.name == DiffKVCache(model).config.low.name == "K8V8"
    assert DiffKVCache(model, high="K8V5").config.low.name == "K8V5"
    assert not DiffKVCache(model).config.selects
    cache = DiffKVCache(model, head_precisions=[["K8V6"], ["K8V4"]])
    text(model, cache)
    assert [store.layout.high.v_bits for store in cache.stores.all] == [6, 4]
    # low and high are the defaults, and no layer uses them
    table = DiffKVConfig(head_precisions=[["K8V6"], ["K8V4"]], window=8)
    for fields in ({}, {"max_bytes": 100_000}):
        cache = DiffKVCache(model, table, **fields)
        text(model, cache)
        cache.check_integrity()
        tiers = [tier for store in cache.stores.all for tier in (store.layout.high, store.layout.low)]
        assert {(tier.k_bits, tier.v_bits) for tier in tiers} >= {(8, 6), (8, 4)}
        assert all(tier.k_bits == 8 for tier in tiers)
    with pytest.raises(ValueError, match="low=K4V2.*at least 8 bits"):
        DiffKVCache(model, DiffKVConfig(head_precisions=[["K8V6"], None]))
    large = CONFIG_MAPPING["deepseek_v3"]()
    assert DiffKVConfig.for_model(large, target_ratio=0.6).high.name == "K8V8"
    assert DiffKVConfig.for_model(large, target_ratio=0.3).high.name == "K8V4"
    with pytest.raises(ValueError, match="below what K8V3 needs"):
        DiffKVConfig.for_model(large, target_ratio=0.1)


def test_prompts_fill_a_budget_until_all_is_final(model: PreTrainedModel, turns: int = 6) -> None:
    """Prompts lower rows only as far as they must, and the first that does not fit changes nothing."""
    model.set_attn_implementation("diffkv")
    fields = {"window": 8, "page_bytes": 512}
    ids = torch.randint(3, 100, (4, 150 * turns), generator=torch.Generator().manual_seed(6))
    held = {}
    for name in ("K8V8", "K8V4"):
        cache = DiffKVCache(model, high=name, low=name, **fields)
        with torch.no_grad():
            model(ids, **passing(cache))
        held[name] = cache.memory().compressed_bytes
    # a page per row and turn is only begun, and the pool keeps a part of the budget free
    for max_bytes, final in ((2 * held["K8V8"], False), (1.1 * held["K8V4"], True)):
        cache = DiffKVCache(model, high="K8V4", low="K8V4", max_bytes=int(max_bytes), until_full="K8V8", **fields)
        precise = []
        with torch.no_grad():
            for turn in ids.split(150, dim=1):
                model(turn, **passing(cache))
                cache.check_integrity()
                precise.append(int(sum((~store.low_heads).sum() for store in cache.stores.all)))
                assert cache.memory().compressed_bytes <= max_bytes
        assert precise == sorted(precise, reverse=True)
        assert (len(set(precise)) > 2) == final == (cache.memory().lowered > 0)
    before, seen = [part for layer in cache.layers for part in (layer.keys, layer.values)], cache.get_seq_length()
    with pytest.raises(MemoryError, match="with all tokens at K8V4.*until_full=None"), torch.no_grad():
        model(ids, **passing(cache))
    assert cache.get_seq_length() == seen
    assert all(map(torch.equal, before, [part for layer in cache.layers for part in (layer.keys, layer.values)]))


def test_code_that_expands_otherwise_is_refused() -> None:
    """A model whose classes have no `expand_kv`, as code from the Hub may be, is refused when the cache is made."""

    class OwnConfig(CONFIG_MAPPING["deepseek_v3"]):
        pass

    with pytest.raises(UnsupportedModelError, match="does not expand them"):
        DiffKVCache(OwnConfig(num_hidden_layers=2))


def test_keys_of_all_heads_are_refused(model: PreTrainedModel) -> None:
    cache = lossless(model)
    states: Tensor = torch.zeros(1, 4, 3, 16)
    with pytest.raises(HandOverError, match="caches 4 heads"):
        cache.update(states, states, 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_each_precision_of_latents(bits: int) -> None:
    """Outputs are those of dense attention over what the cache gives back, computed from the expanded latents."""
    model = latent_model("deepseek_v3")
    ids = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(4))
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model, high=f"K8V{bits}", window=8, sinks=2)
    with torch.no_grad():
        model(ids[:, :-1], **passing(cache))
        twin = dense(model)
        for index, layer in enumerate(cache.layers):
            twin.update(layer.keys, layer.values, index)
        logits = [model(ids[:, -1:], **passing(each)).logits for each in (cache, twin)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=2e-4)
    assert (cache.levels(0) == 2).sum() > 40


def test_a_long_turn_that_is_refused_leaves_nothing_to_the_next_forward() -> None:
    """It would have expanded latents, which shorter forwards do not."""
    model = latent_model("deepseek_v3")
    model.set_attn_implementation("diffkv")
    run, expected = started(model, (40, 31), lossless(model).config), started(model, (40, 31), lossless(model).config)
    mask, run.mask = run.mask, torch.ones_like(run.mask)
    with pytest.raises(ValueError, match="padding or hidden before"):
        run.feed(tokens(2, 200))
    run.mask = mask
    assert torch.equal(run.feed(tokens(2, 3)), expected.feed(tokens(2, 3)))
