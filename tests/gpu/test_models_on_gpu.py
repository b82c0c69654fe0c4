"""Whole models on a GPU: the same text as on a CPU, and no wait for the device between two refreshes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from device_waits import no_waits
from tiny_models import tiny_model
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, DiffKVConfig, PrefixStore
from hf_diffkv.compat import passing


def build(dtype: torch.dtype) -> PreTrainedModel:
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return tiny_model("llama", dtype=dtype, **sizes, **heads)


@torch.no_grad()
def logits(model: PreTrainedModel, cache: DiffKVCache, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    model.set_attn_implementation("diffkv")
    found = [model(tokens[:, :-steps], **passing(cache)).logits[:, -1:]]
    found += [model(token, **passing(cache)).logits for token in tokens[:, -steps:].split(1, dim=1)]
    return torch.cat(found, dim=1).cpu()


def test_logits_agree_with_the_cpu(device, length: int = 600, steps: int = 40) -> None:
    """float32: levels change on the way, the GPU by kernels, the CPU by the reference."""
    model = build(torch.float32)
    tokens = torch.randint(0, 256, (2, length))
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16)
    expected = logits(model, cache := DiffKVCache(model.config, config), tokens, steps)
    levels = cache.levels(1)
    model = model.to(device)
    got = logits(model, cache := DiffKVCache(model.config, config), tokens.to(device), steps)
    cache.check_integrity()
    assert (cache.levels(1).cpu() != levels).float().mean() < 0.01
    assert float((got - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lossless_generation_is_as_exact_as_a_dense_cache(device, dtype) -> None:
    """Both lose the same to 16-bit arithmetic: the yardstick is the same model in float32."""
    model = build(torch.float32).to(device)
    tokens = torch.randint(0, 256, (3, 333), device=device)
    mask = torch.ones_like(tokens)
    mask[1, :100] = 0

    def run(cache: Cache, attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            first = model(tokens, attention_mask=mask, **passing(cache)).logits[:, -1]
            mask_more = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            second = model(tokens[:, :1], attention_mask=mask_more, **passing(cache)).logits[:, -1]
        return torch.stack([first, second]).float()

    exact = run(DynamicCache(config=model.config), "sdpa")
    assert run(DiffKVCache(model.config, DiffKVConfig.lossless()), "diffkv").sub(exact).norm() < 1e-3 * exact.norm()
    model = model.to(dtype)
    dense = run(DynamicCache(config=model.config), "sdpa").sub(exact).norm()
    lossless = run(DiffKVCache(model.config, DiffKVConfig.lossless()), "diffkv").sub(exact).norm()
    assert lossless < 1.5 * dense


def test_no_step_waits_between_refreshes(device, length: int = 700, steps: int = 40) -> None:
    model = build(torch.bfloat16).to(device)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16))
    tokens = torch.randint(0, 256, (2, length), device=device)
    checked = 0
    with torch.no_grad():
        model(tokens, **passing(cache))
        for step in range(steps):
            token = tokens[:, step : step + 1]
            positions = torch.full((2, 1), length + step, device=device)
            quiet = cache.stores.all[0].steps_left > 0 and step > 1
            torch.cuda.synchronize()
            with no_waits(quiet):
                model(token, **passing(cache), position_ids=positions)
            checked += quiet
    assert checked > steps // 2
    cache.check_integrity()


def test_copies_and_forks_on_a_gpu(device) -> None:
    model = build(torch.bfloat16).to(device)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, window=16))
    tokens = torch.randint(0, 256, (1, 500), device=device)
    with torch.no_grad():
        model(tokens, **passing(cache))
        others = [copy.deepcopy(cache), *cache.fork(1)]
        expected = model(tokens[:, :1], **passing(cache)).logits
        for other in others:
            torch.testing.assert_close(model(tokens[:, :1], **passing(other)).logits, expected)
            other.check_integrity()
    cache.check_integrity()


def test_prefixes_from_every_tier(device, tmp_path: Path) -> None:
    """Compares logits with a cache that stayed, from each tier: device, page-locked host memory, and a folder."""
    model = build(torch.bfloat16).to(device)
    model.set_attn_implementation("diffkv")
    config = DiffKVConfig(alpha_high=1.0, window=16)
    cache = DiffKVCache(model.config, config)
    tokens = torch.randint(0, 256, (1, 300), device=device)
    room, tiers = {"device_bytes": 0, "host_bytes": 0, "folder": tmp_path}, ["device", "host", "disk"]
    stores = [PrefixStore(model, config, **{**room, limit: 1 << 24}) for limit in ("device_bytes", "host_bytes")]
    stores.append(PrefixStore(model, config, **room))
    with torch.no_grad():
        model(tokens[:, :-9], **passing(cache))
        assert all(store.insert(tokens, cache) for store in stores)
        expected = model(tokens[:, -9:], **passing(cache)).logits
        for store, tier in zip(stores, tiers):
            restored = store.lookup(tokens)
            assert torch.equal(model(tokens[:, -9:], **passing(restored)).logits, expected)
            restored.check_integrity()
            # on a CPU the two are one
            held = {"device", tier} if device.type == "cpu" and tier == "host" else {tier}
            assert {entry.tier for entry in store} <= held
    if device.type == "cuda":
        snapshots = [next(iter(store._tiers.tiers[depth]._held.values())) for depth, store in enumerate(stores[:2])]
        assert all(tensor.is_cuda for tensor in snapshots[0].tensors.values())
        assert all(tensor.is_pinned() for tensor in snapshots[1].tensors.values())
