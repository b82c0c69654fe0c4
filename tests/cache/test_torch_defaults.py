"""PyTorch's default dtype and default device, which programs set for their own tensors, do not affect a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import greedy, ragged_prompts, tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import use_backend

SELECTING = {"alpha_high": 1.2, "alpha_low": 0.8, "window": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "one level": {},
    "selecting": SELECTING,
    "pruning to a budget": {**SELECTING, "max_bytes": 60_000, "until_full": None},
    "lowered to a budget": {"window": 8, "max_bytes": 60_000},
    "leankv": {**SELECTING, "policy": "leankv"},
    "shared moments": {"high": "K3V2", "low": "K3V2", "window": 8, "adaptive_rounding": True},
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def found(model: PreTrainedModel, fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Text, contents and report of a cache that was saved, loaded, forked and continued."""
    ids, mask = ragged_prompts((90, 47))
    cache = DiffKVCache(model, **fields)
    output = greedy(model, ids, mask, 20, **passing(cache))
    cache.save_pretrained(folder)
    cache = DiffKVCache.from_pretrained(folder, model).fork(1)[0]
    mask = torch.cat([mask, mask.new_ones(2, 20)], 1)
    text = greedy(model, output.sequences, mask, 6, **passing(cache)).sequences
    cache.check_integrity()
    contents = {"text": text, "logits": torch.stack(output.logits)}
    for layer in cache.compressed_layers():
        contents[f"levels {layer}"] = cache.levels(layer)
        contents[f"keys {layer}"], contents[f"values {layer}"] = cache.dequantize(layer)[:2]
        if cache.config.selects:
            contents[f"sums {layer}"] = cache.significance(layer)
    return {**contents, "memory": str(cache.memory())}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(actual[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert actual[name] == value


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_default_dtype(dtype: torch.dtype, config: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = found(model, CONFIGS[config], tmp_path / "before")
    with default_dtype(dtype):
        assert_same(found(model, CONFIGS[config], tmp_path / "after"), expected)


def test_default_dtype_without_native_code(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with use_backend("reference"):
        expected = found(model, SELECTING, tmp_path / "before")
        with default_dtype(torch.bfloat16):
            assert_same(found(model, SELECTING, tmp_path / "after"), expected)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_default_dtype_of_other_models(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, "eager")
    expected = found(model, {}, tmp_path / "before")
    with default_dtype(torch.bfloat16):
        assert_same(found(model, {}, tmp_path / "after"), expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_default_device(config: str) -> None:
    """Tensors on the default device have no values here, so that any use of them is noticed."""
    model, (ids, _) = tiny_model("llama", "diffkv"), ragged_prompts((110, 110))

    @torch.no_grad()
    def fed() -> dict[str, Any]:
        cache = DiffKVCache(model, **CONFIGS[config])
        positions = torch.arange(ids.shape[1], device="cpu").expand_as(ids)
        parts = zip(ids.split([90, *[1] * 20], 1), positions.split([90, *[1] * 20], 1))
        logits = [model(part, position_ids=at, **passing(cache)).logits for part, at in parts]
        levels = {str(layer): cache.levels(layer) for layer in cache.compressed_layers()}
        return {"logits": torch.cat(logits, 1), "memory": str(cache.memory()), **levels}

    expected = fed()
    with default_device("meta"):
        assert_same(fed(), expected)
