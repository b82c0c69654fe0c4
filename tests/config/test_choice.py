"""Configuration that a model gets by default: from a file beside it, from measurements of its heads, or a preset."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_heads import measured
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.config.presets import PRESETS
from hf_diffkv.heads import lookup
from hf_diffkv.heads.sensitivity import Sensitivity
from hf_diffkv.heads.weights import model_digest
from hf_diffkv.planning import without_weights


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(lookup, "_told", set())
    return tmp_path / "kept"


def bits(config: DiffKVConfig) -> list[list[int]]:
    return [[precision.k_bits + precision.v_bits for precision in layer] for layer in config.head_precisions]


def balanced(**fields: Any) -> DiffKVConfig:
    return DiffKVConfig.preset("balanced", **fields)


def big_model(seed: int = 0) -> PreTrainedModel:
    """Heads of 64, where precisions differ in bytes."""
    return tiny_model("llama", head_dim=64, seed=seed)


def test_measured_heads_are_found_by_the_weights(folder: Path) -> None:
    model, other = big_model(), big_model(seed=1)
    assert lookup.keep(measured(model)) == folder / f"{model_digest(model)}.json"
    sums = {}
    for preset in (None, "quality", "balanced", "small"):
        config = DiffKVCache(model, preset).config
        assert config.window == 32 and config.adaptive_rounding and not config.selects
        sums[preset] = sum(map(sum, bits(config)))
        assert all(layer[0] >= layer[1] for layer in bits(config))
    assert sums["quality"] > sums[None] == sums["balanced"] > sums["small"]
    with torch.no_grad():
        cache = DiffKVCache(model, "small")
        model.set_attn_implementation("diffkv")
        model(torch.arange(3, 120)[None], **passing(cache), use_cache=True)
    names = cache.memory().layers[0].precisions
    assert names == tuple(precision.full_name for precision in cache.config.head_precisions[0])
    # the configuration alone does not tell weights, and other weights were not measured
    assert DiffKVCache(model.config).config == DiffKVCache(other).config == balanced()
    assert DiffKVCache(other, "small").config == DiffKVConfig.preset("small")


def test_measured_heads_come_before_the_papers_settings() -> None:
    model = big_model()
    model.config._name_or_path = "Qwen/QwQ-32B"
    assert DiffKVCache(model).config == DiffKVConfig.for_model("Qwen/QwQ-32B") != balanced()
    lookup.keep(measured(model))
    assert DiffKVCache(model).config == DiffKVCache(model, "balanced").config
    assert DiffKVCache(model).config.head_precisions is not None


def test_what_a_user_chooses_stands(folder: Path) -> None:
    model = big_model()
    lookup.keep(measured(model))
    assert DiffKVCache(model, high="K8V4").config.head_precisions is None
    assert DiffKVCache(model, policy="leankv").config.head_precisions is None
    assert DiffKVCache(model, DiffKVConfig()).config == DiffKVConfig()
    chosen = DiffKVCache(model, window=5, target_ratio=0.3).config
    assert chosen.window == 5 and sum(map(sum, bits(chosen))) > sum(map(sum, bits(DiffKVCache(model).config)))
    # more bytes than the ladder can use
    assert DiffKVCache(model, target_ratio=0.6).config.head_precisions is None
    with pytest.raises(ValueError, match="preset='small' and target_ratio=0.3 both choose"):
        DiffKVCache(model, "small", target_ratio=0.3)
    with pytest.raises(ValueError, match="no preset 'smal'; did you mean 'small'"):
        DiffKVCache(model, "smal")
    with pytest.raises(ValueError, match="preset chooses a configuration"):
        DiffKVCache(model, DiffKVConfig(), preset="small")


def test_generate_finds_them_too() -> None:
    model = big_model()
    lookup.keep(measured(model))
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    ids = torch.arange(3, 60)[None]
    for preset in PRESETS:
        output = model.generate(ids, cache_implementation="diffkv", cache_config=preset, **options)
        assert output.past_key_values.config == DiffKVConfig.for_model(model, preset=preset)
        assert output.past_key_values.config.head_precisions is not None
    with pytest.raises(ValueError, match="did you mean 'balanced'"):
        model.generate(ids, cache_implementation="diffkv", cache_config="balancd", **options)


def test_a_file_beside_the_model_comes_first(tmp_path: Path) -> None:
    model = big_model()
    lookup.keep(measured(model))
    model.save_pretrained(tmp_path / "model")
    calibrated = DiffKVCache(model, target_ratio=0.21).config
    calibrated.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert DiffKVCache(loaded).config == DiffKVCache(loaded.config).config == calibrated
    assert DiffKVConfig.for_model(str(tmp_path / "model")) == calibrated
    assert DiffKVCache(loaded, window=7).config.window == 7
    # with what was measured in it, another ratio follows from the file alone
    lookup.user_folder().joinpath(f"{model_digest(model)}.json").unlink()
    assert DiffKVCache(loaded.config, "quality").config == calibrated.with_ratio(0.27)
    for content in ("{", '{"windwo": 7}', '{"window": "wide"}'):
        (tmp_path / "model" / "diffkv_config.json").write_text(content)
        with pytest.raises(ValueError, match="model/diffkv_config.json: "):
            DiffKVCache(loaded)


@pytest.mark.parametrize("shards", ["50GB", "200KB"])
def test_weights_on_disk_are_known_without_being_loaded(shards: str, tmp_path: Path) -> None:
    model = big_model()
    lookup.keep(measured(model))
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "200KB")
    assert DiffKVConfig.for_model(without_weights(AutoConfig.from_pretrained(tmp_path))) == DiffKVCache(model).config
    # a parameter in another shape
    other = without_weights(AutoConfig.from_pretrained(tmp_path, vocab_size=8))
    assert not lookup.weights_known(other) and DiffKVConfig.for_model(other) == balanced()
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"no tensors")
    assert not lookup.weights_known(without_weights(AutoConfig.from_pretrained(tmp_path)))


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = big_model(), tiny_model("llama", num_hidden_layers=3, head_dim=64)
    lookup.keep(measured(model))
    other.save_pretrained(tmp_path)
    DiffKVCache(model).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="head_precisions has 2 entries but 3 layers"):
        DiffKVCache(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_it_is_said_once_what_measuring_would_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    big_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        DiffKVCache(model)
        DiffKVCache(model, "small")
        DiffKVCache(model.config)
    (record,) = caplog.records
    assert f"hf-diffkv calibrate --model {tmp_path}`" in record.getMessage()


@pytest.mark.parametrize("path", sorted(lookup.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_what_ships_can_be_read(path: Path) -> None:
    table = Sensitivity.load(path)
    assert Sensitivity.load(lookup._shipped()[table.model_digest]) == table
