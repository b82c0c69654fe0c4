"""Layers of which some heads have a precision each and others choose tokens: each is as if all were of its kind."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import started, tokens
from simulated_attention import simulated
from test_compressed_models import generate
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import use_backend

pytestmark = pytest.mark.oldest
LENGTHS = (130, 1, 77)
# in float64 scales and sums of 32 bits are near enough to those of the simulation
PLAIN = DiffKVConfig(alpha_high=1.6, alpha_low=0.8, window=16, metadata_bits=32, adaptive_rounding=False)
# the first head of the first layer and the last one of the second have a precision; both layers are two groups
SPLIT = replace(PLAIN, head_precisions=((PLAIN.high, None), (None, PLAIN.low)))
# the same heads by thresholds of their own, with sums and positions that nothing depends on
BY_THRESHOLDS = replace(PLAIN, alpha_high=((0.0, 1.6), (1.6, math.inf)), alpha_low=((0.0, 0.8), (0.8, 0.0)))
# which head of each layer has one
FIXED = (0, 1)


def model_of(name: str = "llama", attention: str = "diffkv", **options: Any) -> PreTrainedModel:
    return tiny_model(name, attention, dtype=torch.float64, **options)


def assert_held_alike(actual: DiffKVCache, expected: DiffKVCache, atol: float = 1e-9) -> None:
    """Compares tokens and levels, and the sums of heads that choose tokens. Other heads must have no sums."""
    actual.check_integrity()
    assert actual.get_seq_length() == expected.get_seq_length()
    compare = functools.partial(torch.allclose, rtol=0, atol=atol)
    for layer, layer_idx in enumerate(actual.compressed_layers()):
        assert torch.equal(actual.levels(layer_idx), as_split(expected.levels(layer_idx), layer))
        *mine, here = actual.dequantize(layer_idx)
        *theirs, there = expected.dequantize(layer_idx)
        assert all(map(compare, mine, theirs)) and torch.equal(here, there)
        sums, other_sums = actual.significance(layer_idx), expected.significance(layer_idx)
        fixed, chosen = FIXED[layer], 1 - FIXED[layer]
        assert sums[:, fixed].isnan().all()
        assert compare(sums[:, chosen], other_sums[:, chosen])
    counted = [sum(cache.memory().tokens.values()) for cache in (actual, expected)]
    assert counted[0] == counted[1]


def as_split(levels: Tensor, layer: int) -> Tensor:
    """Maps the levels of heads with infinite thresholds: their low level is the only one of a head by itself."""
    levels = levels.clone()
    levels[:, FIXED[layer]] = torch.where(levels[:, FIXED[layer]] == 1, 2, levels[:, FIXED[layer]])
    return levels


@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_generation_equals_the_simulation(backend: str, chunk: int | None) -> None:
    model = model_of(attention="eager")
    ids, mask = ragged_prompts(LENGTHS)
    options = {"prefill_chunk_size": chunk}
    with simulated(model, BY_THRESHOLDS) as simulation:
        expected = generate(model, DynamicCache(config=model.config), ids, mask, 40, **options)
    cache = DiffKVCache(model.config, SPLIT)
    with use_backend(backend):
        sequences, logits = generate(model, cache, ids, mask, 40, **options)
    assert torch.equal(sequences, expected[0])
    torch.testing.assert_close(logits, expected[1], rtol=0, atol=1e-6)
    exact = generate(model, DynamicCache(config=model.config), ids, mask, 40, **options)
    assert not torch.equal(exact[0], expected[0]), "compression changed nothing, so this comparison proves nothing"
    assert all(len(layer.parts) == 2 for layer in cache.layers)
    for layer_idx, layer in simulation.layers.items():
        assert torch.equal(cache.levels(layer_idx), as_split(layer.levels(), layer_idx))


@pytest.mark.slow
def test_kernels_hold_the_same() -> None:
    model = model_of().float()
    with use_backend("kernels"):
        split = started(model, (70, 9), SPLIT)
        split.steps(tokens(2, 3))
        other = started(model, (70, 9), BY_THRESHOLDS)
        other.steps(tokens(2, 3))
    assert_held_alike(split.cache, other.cache, atol=1e-5)


def test_heads_with_a_precision_keep_neither_sums_nor_positions() -> None:
    model = model_of()
    run, other = (started(model, LENGTHS, config) for config in (SPLIT, BY_THRESHOLDS))
    for cached in (run, other):
        cached.steps(tokens(3, 20))
    assert_held_alike(run.cache, other.cache)
    selects = [store.layout.selects for store in run.cache.stores.all]
    assert sorted(selects) == [False, False, True] and len(other.cache.stores.all) == 1
    for store in run.cache.stores.all:
        assert (store.layout.high.position_bytes > 0) == store.layout.selects
    layers = run.cache.memory().layers
    assert [layer.precisions for layer in layers] == [("K8V4", "K8V4/K4V2"), ("K8V4/K4V2", "K4V2")]
    assert [layer.window for layer in layers] == [layer.window for layer in other.cache.memory().layers]


def test_all_that_changes_rows_and_tokens(tmp_path: Path) -> None:
    """Against a cache with the same levels by thresholds, whose operations have tests of their own."""
    model = model_of()
    runs = [started(model, LENGTHS, config) for config in (SPLIT, BY_THRESHOLDS)]

    def both(change: Any) -> None:
        for run in runs:
            change(run)
        assert_held_alike(runs[0].cache, runs[1].cache)

    both(lambda run: run.feed(tokens(3, 30, 1)))
    both(lambda run: run.steps(tokens(3, 5, 2)))
    both(lambda run: run.select([2, 0]))
    both(lambda run: run.steps(tokens(2, 4, 3)))
    forks = [run.on(run.cache.fork(1)[0]) for run in runs]
    both(lambda run: run.steps(tokens(2, 4, 4)))
    for fork in forks:
        fork.steps(tokens(2, 6, 5))
    assert_held_alike(forks[0].cache, forks[1].cache)
    copies = [run.on(copy.deepcopy(run.cache)) for run in runs]
    for run in copies:
        run.cache.activate_past_recording()
        run.feed(tokens(2, 9, 6))
        run.crop(5)
        run.feed(tokens(2, 3, 7))
        run.crop(0)
    assert_held_alike(copies[0].cache, copies[1].cache)
    runs[0].cache.save_pretrained(tmp_path, model)
    loaded = runs[0].on(DiffKVCache.from_pretrained(tmp_path, model))
    assert_held_alike(loaded.cache, runs[1].cache)
    loaded.steps(tokens(2, 20, 8))
    runs[1].steps(tokens(2, 20, 8))
    assert_held_alike(loaded.cache, runs[1].cache)
    loaded.cache.reset()
    assert loaded.cache.get_seq_length() == 0 and "empty" in repr(loaded.cache)


@pytest.mark.parametrize("name", ["gemma4_text", "gpt_oss"])
def test_other_kinds_of_layers(name: str) -> None:
    """Sinks of query heads, sliding windows, and layers that read an earlier one."""
    from test_shared_layers import OPTIONS

    model = model_of(name, "eager", **OPTIONS.get(name, {}))
    layers = len(DiffKVCache(model.config).compressed_layers())
    split, by_thresholds = (
        replace(config, **{field: getattr(config, field)[:layers] for field in fields})
        for config, fields in ((SPLIT, ("head_precisions",)), (BY_THRESHOLDS, ("alpha_high", "alpha_low")))
    )
    ids, mask = ragged_prompts(LENGTHS)
    with simulated(model, by_thresholds):
        expected = generate(model, DynamicCache(config=model.config), ids, mask, 30)
    cache = DiffKVCache(model.config, split)
    sequences, logits = generate(model, cache, ids, mask, 30)
    assert torch.equal(sequences, expected[0])
    torch.testing.assert_close(logits, expected[1], rtol=0, atol=1e-6)
    cache.check_integrity()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"num_return_sequences": 2}])
def test_modes_of_generate(options: dict[str, Any]) -> None:
    model = model_of("qwen3")
    ids, _ = ragged_prompts(LENGTHS[:1])
    options = {**options, "do_sample": "num_return_sequences" in options, "max_new_tokens": 24}
    results = []
    for config in (SPLIT, BY_THRESHOLDS):
        torch.manual_seed(0)
        results.append(model.generate(ids, **passing(DiffKVCache(model.config, config)), **options))
    assert torch.equal(*results)


def test_an_error_in_the_first_group_leaves_the_cache_as_it_was() -> None:
    model = model_of()
    run = started(model, LENGTHS, SPLIT)
    before = [cached.clone() for cached in held(run.cache)]
    weight = model.model.layers[0].self_attn.k_proj.weight
    kept, dim = weight.detach().clone(), model.config.head_dim
    # thresholds level the second head, whose group comes first
    with torch.no_grad():
        weight[dim:] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        run.feed(tokens(3, 4))
    with torch.no_grad():
        weight.copy_(kept)
    assert all(map(torch.equal, held(run.cache), before))
    run.feed(tokens(3, 4))
    run.cache.check_integrity()


def held(cache: DiffKVCache) -> list[Tensor]:
    return [part for layer_idx in cache.compressed_layers() for part in cache.dequantize(layer_idx)]


def test_an_error_in_a_later_group_is_not_forgotten() -> None:
    model = model_of()
    run = started(model, LENGTHS, SPLIT)
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        weight[: model.config.head_dim] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        run.feed(tokens(3, 4))
    with pytest.raises(Exception, match="reset"):
        run.feed(tokens(3, 4))
    run.cache.reset()


def test_wrong_uses_are_explained() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"head_precisions\[0\] has 3 entries but the layer has 2 KV heads"):
        started(model, LENGTHS, replace(PLAIN, head_precisions=((PLAIN.high, None, None), None)))
    with pytest.raises(ValueError, match="head_precisions has 1 entries but 2 layers"):
        DiffKVCache(model.config, replace(PLAIN, head_precisions=((PLAIN.high, None),)))
    with pytest.raises(ValueError, match="alpha_high has 2 entries for layer 0"):
        DiffKVCache(
            model.config,
            replace(SPLIT, head_precisions=((PLAIN.high, PLAIN.high, None), None), alpha_high=((1.0, 1.0),) * 2),
        )


def test_a_configuration_says_which_heads_have_none() -> None:
    values = SPLIT.to_dict()
    assert values["head_precisions"] == [["K8V4", None], [None, "K4V2"]]
    assert DiffKVConfig.from_dict(values) == SPLIT == DiffKVConfig.from_json(SPLIT.to_json())
    assert SPLIT.is_split and SPLIT.selects and not BY_THRESHOLDS.is_split
    # a layer of which no head has a precision is as one without
    assert replace(SPLIT, head_precisions=((None, None), None)).head_precisions == (None, None)
