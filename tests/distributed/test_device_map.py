"""Models spread by `device_map`: where each layer is expected, and real offloading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import CONFIG, assert_equal_contents, model_of
from tiny_models import ragged_prompts, tiny_model
from transformers import AutoModelForCausalLM

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache import devices
from hf_diffkv.cache.devices import layer_devices
from hf_diffkv.compat import passing

pytestmark = pytest.mark.oldest


def test_offloaded_weights(tmp_path: Path) -> None:
    """Half of the layers on disk: the same text and the same cache."""
    model = model_of(num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(4)}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert offloaded.model.layers[3].self_attn.k_proj.weight.device.type == "meta"
    ids, mask = ragged_prompts((90, 33))
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    for config in (CONFIG, DiffKVConfig.lossless(window=16)):
        found, expected = DiffKVCache(offloaded.config, config), DiffKVCache(model.config, config)
        text = offloaded.generate(ids, **passing(found), **options)
        assert torch.equal(text, model.generate(ids, **passing(expected), **options))
        assert_equal_contents(found, expected)


def test_where_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma2", "diffkv", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    monkeypatch.setattr(devices, "_actual", lambda device: device)
    assert layer_devices(model) == {}
    for single in ({"": 0}, {"": "cpu"}, {"model.layers": "cpu", "lm_head": "disk", "model.embed_tokens": 0}):
        model.hf_device_map = single
        assert layer_devices(model) == {}
    model.hf_device_map = {"model.embed_tokens": 1, "model.layers.0": 1, "model.layers.1": 2}
    model.hf_device_map |= {
        "model.layers.2": "disk",
        "model.layers.3.self_attn": 2,
        "model.layers.3": 1,
        "lm_head": "cpu",
    }
    assert layer_devices(model) == {0: 1, 1: 2, 2: 1, 3: 2}
    cache = DiffKVCache(model.config)
    cache.attach(model)
    assert cache.stores.devices == [2, 2]  # of the compressed layers, 1 and 3
    to_come = [cache.stores._layers_to_come(device, 0) for device in (2, 7)]
    assert to_come == [2, 1]
