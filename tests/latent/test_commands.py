"""Planning, verifying and inspecting models that cache latents."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from latent_models import latent_model, text
from transformers import CONFIG_MAPPING

from hf_diffkv import DiffKVCache, measure_heads
from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.cli import main
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.planning import ModelShape
from hf_diffkv.running.models import TINY_LM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    latent_model("deepseek_v3", vocab_size=1024).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LM / name, path / name)
    return path


@pytest.mark.parametrize("name, layers, dims", [("deepseek_v3", 61, (64, 512)), ("glm4_moe_lite", 47, (64, 512))])
def test_planned_bytes(name: str, layers: int, dims: tuple[int, int]) -> None:
    """From the published configuration alone: a row of 576 elements for each layer."""
    config = CONFIG_MAPPING[name](dtype=torch.bfloat16)
    shape = ModelShape.of(config, name)
    assert shape.num_compressed == len(shape.layers) == layers
    assert {(layer.num_key_value_heads, layer.key_dim, layer.value_dim) for layer in shape.layers} == {(1, *dims)}
    tokens = 32768
    assert shape.dense_bytes(tokens) == tokens * layers * sum(dims) * 2
    ratio = shape.diffkv_bytes(tokens, DiffKVConfig.for_model(config), 1.0) / shape.dense_bytes(tokens)
    # 576 codes, and a scale and a zero point each for key and latent, of 1,152 bytes
    assert 0.5 < ratio < 0.53


def test_planned_bytes_are_those_of_a_cache() -> None:
    model = latent_model("deepseek_v3")
    cache = DiffKVCache(model, high="K8V4", window=8)
    text(model, cache, 4, (90,))
    shape = ModelShape.of(model.config, "none")
    held = cache.memory()
    planned = shape.diffkv_bytes(cache.get_seq_length(), cache.config, 1.0)
    assert held.dense_bytes == shape.dense_bytes(cache.get_seq_length())
    assert held.bytes / 3 < planned < 3 * held.bytes


def test_verify(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--model", str(folder), "--length", "120", "--continued", "8", "--quiet"]
    assert main(arguments) in (0, 1)
    lossless = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("lossless"))
    assert float(lossless.split()[1]) < 1e-6 and "100.0%" in lossless


def test_inspect(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", str(folder), "--prompt", "one two three " * 20]) == 0
    assert "K8V8" in capfd.readouterr().out


def test_heads_are_not_measured(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match="heads cannot be measured"):
        measure_heads(model, tokenizer, length=600)


def test_the_example(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["latents.py", "--precision", "K16V16"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "latents.py"), run_name="__main__")
    assert "32 of 32 tokens as with DynamicCache" in capfd.readouterr().out
