"""Families whose attention differs on a GPU: sinks, soft caps, windows, shared layers, latents, linear layers."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from tiny_models import greedy, ragged_prompts, tiny_model, with_plain_experts
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

NAMES = (
    "llama4_text gemma2 gpt_oss gemma3_text gemma3n_text granite cohere2 qwen3_moe opt qwen3_next jamba lfm2 "
    "deepseek_v3 longcat_flash"
).split()
LENGTHS = (300, 90, 7)
NEW_TOKENS = 12
WINDOW = 16
LOSSLESS = DiffKVConfig.lossless(window=WINDOW)
COMPRESSED = DiffKVConfig(alpha_high=1.2, alpha_low=0.5, high="K8V4", low="K8V2", window=WINDOW)
# of one expert, as one that is nearly as likely would be another text
ONE_EXPERT = {"num_experts": 1, "num_local_experts": 1, "num_experts_per_tok": 1}
# heads, KV heads and columns of Gemma 2 9B, Gemma 3 270M and gpt-oss
SHAPES = {"gemma2": (4, 2, 256), "gemma3_text": (4, 1, 256), "gpt_oss": (16, 2, 64)}


def build(name: str) -> PreTrainedModel:
    if name not in CONFIG_MAPPING:
        pytest.skip("this release of Transformers does not have it")
    return with_plain_experts(tiny_model(name, "eager", **FAMILIES[name].options))


def forced(model: PreTrainedModel, cache: Cache, attention: str) -> Tensor:
    """Returns float32 logits [2 + steps, batch, vocabulary] of a ragged prompt, a second one, and steps."""
    model.set_attn_implementation(attention)
    ids, mask = ragged_prompts(LENGTHS)
    generator = torch.Generator().manual_seed(2)
    later = torch.randint(3, 100, (len(LENGTHS), 40 + NEW_TOKENS), generator=generator)
    found = []
    with torch.no_grad():
        for given in (ids, later[:, :40], *later[:, 40:].split(1, dim=1)):
            mask = mask if given is ids else torch.cat([mask, torch.ones_like(given)], dim=1)
            inputs = {"input_ids": given.to(model.device), "attention_mask": mask.to(model.device)}
            found.append(model(**inputs, **passing(cache)).logits[:, -1])
    return torch.stack(found).float().cpu()


def distance(got: Tensor, expected: Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:this model has no plain full-attention layer")
def test_lossless_text_is_that_of_a_dense_cache(device, name: str) -> None:
    model = build(name).to(device)
    ids, mask = (tensor.to(device) for tensor in ragged_prompts(LENGTHS))
    expected = greedy(model, ids, mask, NEW_TOKENS, **passing(DynamicCache(config=model.config)))
    cache = DiffKVCache(model.config, LOSSLESS)
    got = greedy(model, ids, mask, NEW_TOKENS, **passing(cache))
    cache.check_integrity()
    assert torch.equal(got.sequences, expected.sequences)
    assert distance(torch.stack(got.logits).cpu(), torch.stack(expected.logits).cpu()) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_compressed_logits_are_those_of_the_cpu(device, name: str) -> None:
    model = build(name)
    expected = forced(model, DiffKVCache(model.config, COMPRESSED), "diffkv")
    dense = forced(model, DynamicCache(config=model.config), "eager")
    model = model.to(device)
    cache = DiffKVCache(model.config, COMPRESSED)
    got = forced(model, cache, "diffkv")
    cache.check_integrity()
    # what compression changes is far more than what the device does
    assert distance(got, expected) < max(1e-3, 0.2 * distance(expected, dense))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_prompts_in_16_bits_are_as_exact_as_of_a_dense_cache(device, name: str, dtype: torch.dtype) -> None:
    """The yardstick is the same model in float32."""
    heads, kv_heads, dim = SHAPES[name]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "hidden_size": 128}
    model = with_plain_experts(tiny_model(name, "eager", **{**FAMILIES[name].options, **ONE_EXPERT, **sizes})).to(
        device
    )
    exact = forced(model, DynamicCache(config=model.config), "eager")
    model = model.to(dtype)
    dense = distance(forced(model, DynamicCache(config=model.config), "eager"), exact)
    assert distance(forced(model, DiffKVCache(model.config, LOSSLESS), "diffkv"), exact) < 1.5 * dense
