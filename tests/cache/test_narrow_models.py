"""Whole models with a cache on narrow pages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_compressed_models import assert_go_on_alike, generate
from test_weights import QUESTIONS, TEXT, TINY_LM, answers
from tiny_models import ragged_prompts, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.cache.io import JSON_NAME, _checksum
from hf_diffkv.compat import passing
from hf_diffkv.store import KVHeads, state

CONFIG = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16, metadata_bits=16)
WIDE = dataclasses.replace(CONFIG, metadata_bits=32)


@pytest.mark.slow
def test_levels_are_nearly_those_of_wide_pages() -> None:
    """Compares levels token by token. Sums are off by about 1 %, and few tokens are that close to a threshold."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(TINY_LM)(TEXT, return_tensors="pt").input_ids[:, :500]
    model.set_attn_implementation("diffkv")
    precisions = {"high": Precision(6, 4), "low": Precision(4, 2)}
    caches = [DiffKVCache(model.config, dataclasses.replace(config, **precisions)) for config in (CONFIG, WIDE)]
    logits = []
    for cache in caches:
        with torch.no_grad():
            model(ids[:, :200], **passing(cache))
            steps = [model(ids[:, i : i + 1], **passing(cache)).logits[0, -1] for i in range(200, 500)]
        logits.append(torch.stack(steps))
        cache.check_integrity()
    levels = [torch.stack([cache.levels(i) for i in cache.compressed_layers()]) for cache in caches]
    assert 0 < float((levels[0] != levels[1]).float().mean()) < 0.05
    assert min(float((levels[1] == level).float().mean()) for level in (0, 1, 2)) > 0.02
    chosen = [torch.softmax(part, -1) for part in logits]
    assert float((chosen[0] - chosen[1]).abs().sum(-1).mean()) < 0.1
    held = [cache.memory() for cache in caches]
    assert held[0].bytes < held[1].bytes and held[0].payload_bytes < 1.02 * held[1].payload_bytes


def test_answers() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.bfloat16)
    cache = DiffKVCache(model.config, dataclasses.replace(CONFIG, alpha_low=0.0))
    assert answers(model, cache) == list(QUESTIONS.values())
    cache.check_integrity()


def test_requests_do_not_depend_on_their_batch() -> None:
    """Sums are rounded randomly, but independently of the row in the batch and of pages."""
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, mask = ragged_prompts((40, 90, 7))
    together = DiffKVCache(model.config, CONFIG)
    text, _ = generate(model, together, ids, mask, 30)
    alone = DiffKVCache(model.config, CONFIG)
    single, _ = generate(model, alone, ids[1:2], mask[1:2], 30)
    assert torch.equal(single[0], text[1])
    for layer in alone.compressed_layers():
        assert torch.equal(alone.levels(layer)[0], together.levels(layer)[1])


def test_positions_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, mask = ragged_prompts((40,))
    caches = [DiffKVCache(model.config, CONFIG) for _ in range(2)]
    text = [generate(model, cache, ids, mask, 10)[0] for cache in caches][0]
    assert caches[0].stores.all[0].layout.low.position_bytes == 2
    monkeypatch.setattr(state, "NARROW_POSITIONS", 52)
    inputs = {**passing(caches[0]), "use_cache": True}
    # 49 tokens are stored, since the last one has not been read
    with pytest.raises(ValueError, match=r"53 tokens .* use metadata_bits=32"):
        model(torch.cat([text[:, -1:], ids[:, :3]], 1), **inputs)
    with torch.no_grad():
        for step in range(3):
            got = [model(ids[:, step : step + 1], **passing(cache)).logits for cache in caches]
            assert torch.equal(*got)
    with pytest.raises(ValueError, match="53 tokens"):
        model(ids[:, :1], **inputs)
    caches[0].check_integrity()
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(*[model(ids[:, :1], **passing(cache)).logits for cache in caches])


@pytest.mark.parametrize("positions, size", [(65536, 2), (65537, 4), (None, 4)])
def test_positions_are_narrow_where_the_model_says_so(positions: int | None, size: int) -> None:
    config = tiny_model("llama").config
    config.max_position_embeddings = positions or 1024
    cache = DiffKVCache(config, CONFIG)
    if positions is None:
        cache.stores.max_positions = None
    heads = KVHeads(1, 16, 16, torch.float32, torch.device("cpu"))
    store = cache.stores.make_store(0, 1, 1, heads)
    assert store.layout.high.position_bytes == store.layout.low.position_bytes == size
    wide = DiffKVCache(config, WIDE).stores.make_store(0, 1, 1, heads)
    assert wide.layout.high.position_bytes == wide.layout.high.score_bytes == 4


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["narrow", "wide"])
def test_a_saved_cache_goes_on_alike(config: DiffKVConfig, tmp_path: Path) -> None:
    """Wide pages also load if their configuration does not name them, as in caches saved by earlier releases."""
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, mask = ragged_prompts((60, 4))
    cache = DiffKVCache(model.config, config)
    text, _ = generate(model, cache, ids, mask, 6)
    cache.save_pretrained(tmp_path, model)
    description = tmp_path / JSON_NAME
    content = json.loads(description.read_text())
    assert content["config"]["metadata_bits"] == config.metadata_bits
    if config is WIDE:
        del content["checksum"], content["config"]["metadata_bits"]
        description.write_text(json.dumps({**content, "checksum": _checksum(content)}))
    loaded = DiffKVCache.from_pretrained(tmp_path, model)
    assert loaded.config == config
    assert_go_on_alike(model, [cache, loaded], text, mask)
