"""Whole models whose cache holds rotated, centred keys and rotated values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from captured_steps import assert_alike, build, padded
from recorded_graph import RecordedGraph
from saved_files import without, write_as_before
from test_compressed_models import assert_generates_as_simulated, assert_go_on_alike, assert_turns, generate
from tiny_models import ragged_prompts, tiny_model
from transformers import DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

BOTH = {"rotate": True, "center": True}
CONFIGS = {
    "llama": DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=12, **BOTH),
    "qwen2": DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=12, **BOTH),
    "gemma2": DiffKVConfig(alpha_high=1.2, alpha_low=0.8, window=12, **BOTH),
    "gpt_oss": DiffKVConfig(alpha_high=0.8, alpha_low=0.2, window=12, **BOTH),
}
# rows with no token outside the sinks and the window, at their boundary, and past it
LENGTHS, FURTHER = (1, 2, 15, 16, 17, 90), (5, 1, 64, 17, 9, 30)


def offsets(cache: DiffKVCache) -> torch.Tensor:
    return cache.stores.all[0].key_offset


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(100)
def test_two_turns_equal_the_simulation(name: str) -> None:
    model, config = tiny_model(name, dtype=torch.float64, attention="eager"), CONFIGS[name]
    cache = DiffKVCache(model.config, config)
    logits = assert_turns(model, cache, LENGTHS, FURTHER, least=30)
    # layers with soft-capping or sinks are not centred
    assert bool(offsets(cache).any()) == (name in ("llama", "qwen2"))
    plain = DiffKVCache(model.config, dataclasses.replace(config, rotate=False, center=False))
    assert not torch.equal(assert_turns(model, plain, LENGTHS, FURTHER, least=0), logits), "rotation changed nothing"


@pytest.mark.parametrize("chunk", [10, 50])
@pytest.mark.sampled(100)
def test_chunked_prompts(chunk: int) -> None:
    model, prompts = tiny_model("llama", dtype=torch.float64, attention="eager"), ragged_prompts((130, 1, 77, 16))
    assert_generates_as_simulated(model, CONFIGS["llama"], prompts, 20, least=8, prefill_chunk_size=chunk)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_first_prompt_is_attended_as_it_is(name: str) -> None:
    model = tiny_model(name, "diffkv", dtype=torch.bfloat16)
    ids, mask = ragged_prompts((90, 40))
    logits = []
    for fields in ({"rotate": False, "center": False}, BOTH):
        cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, **fields))
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask, **passing(cache)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast_leaves_the_rotation_alone(name: str) -> None:
    model = tiny_model(name, "diffkv")
    ids, mask = ragged_prompts((40, 20))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = DiffKVCache(model.config, DiffKVConfig.lossless(window=4, **BOTH))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(ids, attention_mask=mask, **passing(cache))
        store = cache.stores.all[0]
        assert store.dtype == torch.bfloat16
        keys = cache.dequantize(cache.compressed_layers()[0])[0]
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            found.append(cache.dequantize(cache.compressed_layers()[0])[0])
        assert torch.equal(found[-1], keys)


@pytest.mark.usefixtures("recorded")
@pytest.mark.slow
def test_captured_steps_through_the_end_of_the_window(steps) -> None:
    """Centring a row runs from Python; before and after it, steps are replayed."""
    pytest.importorskip("triton")
    tokens, mask = padded(1, 1, 3)
    fields = {"window": 10, **BOTH}
    cache, eager = assert_alike(build(1), tokens, 24, fields, attention_mask=mask)
    (step,) = steps
    assert step.replays > 8 and step.captures <= 2, (step.replays, step.captures)
    assert len(RecordedGraph.made) == step.captures
    assert offsets(cache).abs().amax((0, 2, 3)).gt(0).all()
    assert torch.equal(offsets(cache), offsets(eager))
    for index in cache.compressed_layers():
        assert torch.equal(cache.levels(index), eager.levels(index))
        assert torch.equal(cache.dequantize(index)[0], eager.dequantize(index)[0])


@pytest.mark.slow
def test_compiled_forwards() -> None:
    torch._dynamo.reset()
    ids, mask = ragged_prompts((20, 3))
    found = []
    for compiled in (False, True):
        model = tiny_model("llama", "diffkv")
        if compiled:
            model.forward = torch.compile(model.forward, backend="eager")
        cache = DiffKVCache(model.config, CONFIGS["llama"])
        found.append((generate(model, cache, ids, mask, 20), cache))
    assert torch.equal(found[0][0][0], found[1][0][0])
    torch.testing.assert_close(found[0][0][1], found[1][0][1])
    torch.testing.assert_close(offsets(found[0][1]), offsets(found[1][1]))
    torch._dynamo.reset()


@pytest.mark.sampled(100)
def test_a_saved_cache_continues_identically(tmp_path: Path) -> None:
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    config = dataclasses.replace(CONFIGS["llama"])
    ids, mask = ragged_prompts((30, 4))
    cache = DiffKVCache(model.config, config)
    text, _ = generate(model, cache, ids, mask, 6)
    cache.save_pretrained(tmp_path, model)
    loaded = DiffKVCache.from_pretrained(tmp_path, model)
    assert loaded.config == config
    assert torch.equal(offsets(loaded), offsets(cache)) and offsets(loaded)[:, 0].any()
    assert_go_on_alike(model, [cache, loaded], text, mask)
    assert torch.equal(offsets(loaded), offsets(cache)) and offsets(loaded)[:, 1].any()


def test_a_cache_saved_by_0_1_is_what_it_was(tmp_path: Path) -> None:
    """It has no offsets, and its configuration names neither option: keys and values are in the model's channels."""
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, mask = ragged_prompts((30, 4))
    config = dataclasses.replace(CONFIGS["llama"], rotate=False, center=False, sinks=0)
    cache = DiffKVCache(model.config, config)
    text, _ = generate(model, cache, ids, mask, 6)
    cache.save_pretrained(tmp_path)
    write_as_before(tmp_path, 1, ["rotate", "center", "sinks", "metadata_bits"], without("key_offset", "sink_end"))
    loaded = DiffKVCache.from_pretrained(tmp_path, model)
    assert loaded.config == cache.config
    assert_go_on_alike(model, [cache, loaded], text, mask)


def test_beams_and_assisted_decoding() -> None:
    """Requests are reordered and tokens taken back, with and without a budget."""
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, _ = ragged_prompts((10,))
    full = DiffKVConfig.lossless(window=8, **BOTH)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        arguments = {"max_new_tokens": 24, "do_sample": False, **options}
        expected = model.generate(ids, **passing(DynamicCache(config=model.config)), **arguments)
        cache = DiffKVCache(model.config, full)
        assert torch.equal(model.generate(ids, **passing(cache), **arguments), expected)
        cache.check_integrity()
        assert offsets(cache).any()


def test_a_budget_counts_the_offsets() -> None:
    model = tiny_model("llama", "diffkv")
    ids, mask = ragged_prompts((200, 100))
    cache = DiffKVCache(
        model.config, dataclasses.replace(CONFIGS["llama"], alpha_low=0.0, page_bytes=512, max_bytes=90_000)
    )
    generate(model, cache, ids, mask, 20)
    cache.check_integrity()
    assert cache.memory().bytes <= 90_000
