"""Prefixes of latents that come back from a store, and latents of models that are spread over devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latent_models import LOSSLESS, LOSSY, assert_same, dense, latent_model, text
from runs import assert_equal_contents, tokens
from tiny_models import greedy, ragged_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_diffkv import DiffKVCache, PrefixStore
from hf_diffkv.cache import devices
from hf_diffkv.cache.latent import LatentLayer
from hf_diffkv.compat import passing

pytestmark = pytest.mark.oldest


def answer(model: PreTrainedModel, ids: Tensor, cache: object) -> Tensor:
    return greedy(model, ids, torch.ones_like(ids), 6, **passing(cache)).sequences


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("name", ["glm4_moe_lite", "kimi_linear"])
def test_turns_from_a_prefix_store(name: str, on_disk: bool, tmp_path: Path) -> None:
    """Compares turns with those on one cache; on disk every turn has a store of its own, as after a restart."""
    model = latent_model(name)
    options = {"device_bytes": 0, "folder": tmp_path} if on_disk else {}
    store, one = PrefixStore(model, LOSSY, **options), DiffKVCache(model, LOSSY)
    ids, seen = torch.zeros(1, 0, dtype=torch.int64), 0
    for turn, new in enumerate((40, 1, 15)):
        ids = torch.cat([ids, tokens(1, new, turn)], 1)
        expected = answer(model, ids, one)
        store = PrefixStore(model, LOSSY, **options) if on_disk else store
        cache = store.lookup(ids)
        assert cache.get_seq_length() == seen
        assert torch.equal(answer(model, ids, cache), expected)
        assert_equal_contents(cache, one)
        assert isinstance(cache.layers[-1], LatentLayer) and store.insert(expected, cache)
        ids, seen = expected, expected.shape[1] - 1
    assert store.stats.tokens_reused > 0


def test_a_lossless_prefix_gives_the_dense_text() -> None:
    model = latent_model()
    store = PrefixStore(model, LOSSLESS)
    shared, tails = tokens(1, 30, 1), [tokens(1, 9, seed) for seed in (2, 3)]
    assert store.prefill(shared)
    for tail in tails:
        ids = torch.cat([shared, tail], 1)
        cache = store.lookup(ids)
        assert cache.get_seq_length() == 30
        assert torch.equal(answer(model, ids, cache), answer(model, ids, dense(model)))


def test_offloaded_weights(tmp_path: Path) -> None:
    """A layer on disk, whose projection of latents has a hook and no data between two forwards: the same text."""
    model = latent_model("deepseek_v3")
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert offloaded.model.layers[1].self_attn.kv_b_proj.weight.device.type == "meta"
    assert_same(text(offloaded, DiffKVCache(offloaded, LOSSLESS)), text(model, dense(model)))
    ids, mask = ragged_prompts((60, 33))
    found, expected = DiffKVCache(offloaded, LOSSY), DiffKVCache(model, LOSSY)
    sequences = [
        greedy(each, ids, mask, 8, **passing(cache)) for each, cache in ((offloaded, found), (model, expected))
    ]
    assert torch.equal(sequences[0].sequences, sequences[1].sequences)
    assert_equal_contents(found, expected)


@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash"])
def test_layers_of_several_devices_have_stores_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongCat-Flash has two attentions in one decoder layer."""
    model = latent_model(name)
    indices = sorted(module.layer_idx for module in model.modules() if hasattr(module, "kv_b_proj"))
    layers = len(model.model.layers)
    monkeypatch.setattr(devices, "_actual", lambda device: device)
    model.hf_device_map = {"model.embed_tokens": 1, **{f"model.layers.{i}": 1 + i for i in range(layers)}, "lm_head": 2}
    cache = DiffKVCache(model.config)
    cache.attach(model)
    assert cache.compressed_layers() == indices
    assert cache.stores.devices == ([1, 2] if name == "deepseek_v3" else [1, 1])
    del model.hf_device_map
