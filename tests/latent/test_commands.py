"""Planning, verifying and inspecting models that cache latents."""

from __future__ import annotations

import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_models import latent_model, text
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, GenerationMixin

from hf_diffkv import DiffKVCache, measure_heads
from hf_diffkv.cli import main
from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.heads.allocation import LATENT_LADDER
from hf_diffkv.heads.lookup import FOLDER_VARIABLE
from hf_diffkv.heads.sensitivity import Sensitivity
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
    assert len(shape.compressed) == len(shape.layers) == layers
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


def test_calibrate(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of latents get precisions of their ladder; presets stay, and a ratio uses what was measured."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "kept"))
    arguments = ["calibrate", "--model", str(folder), "--length", "900", "--output", str(tmp_path / "run"), "--quiet"]
    assert main([*arguments, "--ratio", "0.8"]) == 0
    printed = capfd.readouterr().out
    assert "K8V6 for all" in printed and "target_ratio=0.8" in printed
    advised = shlex.split(next(line for line in printed.splitlines() if "hf-diffkv calibrate" in line))
    assert main([*advised[1:], "--quiet"]) == 0
    assert "each head its own bits" in capfd.readouterr().out
    assert main([*arguments, "--ratio", "0.8"]) == 0
    saved = DiffKVConfig.from_pretrained(tmp_path / "run")
    ladder = [Precision.parse(name) for name in LATENT_LADDER]
    assert saved.head_precisions and all(precision in ladder for (precision,) in saved.head_precisions)
    assert saved.calibration["ratio"] <= 0.8
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert DiffKVCache(model, target_ratio=0.8).config.head_precisions == saved.head_precisions
    assert [DiffKVCache(model, preset=name).config.high.name for name in ("balanced", "small")] == ["K8V8", "K8V6"]
    cache = DiffKVCache(model, target_ratio=0.8)
    text(model, cache, 4, (90,))
    cache.check_integrity()


def test_losses_of_latents(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = measure_heads(model, AutoTokenizer.from_pretrained(folder), length=900)
    rope, rank = model.config.qk_rope_head_dim, model.config.kv_lora_rank
    assert found.latent and found.shapes == ((1, rope, rank),) * model.config.num_hidden_layers
    assert found.value_errors[2] > 9 * found.value_errors[4] > 81 * found.value_errors[8]
    assert all(0 < loss < 1 for (loss,) in found.values)
    assert Sensitivity.from_dict(found.to_dict()).latent


def test_the_example(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["latents.py", "--precision", "K16V16"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "latents.py"), run_name="__main__")
    assert "32 of 32 tokens as with DynamicCache" in capfd.readouterr().out


def test_the_example_if_a_text_ends_early(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter((5, 3))

    def generate(model: GenerationMixin, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.cat([ids, ids.new_zeros(1, next(lengths))], dim=1)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.setattr(sys, "argv", ["latents.py"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "latents.py"), run_name="__main__")
    assert "3 of 5 tokens as with DynamicCache" in capfd.readouterr().out
