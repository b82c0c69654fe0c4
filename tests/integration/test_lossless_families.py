"""A lossless `DiffKVCache` generates what `DynamicCache` generates, whatever the architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.integration.layer import DiffKVLayer

LENGTHS = (200, 131, 64)
NEW_TOKENS = 64
LAYERS = 2
# the other architectures have one full-attention layer between sliding ones
ALL_FULL = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "olmo2", "granite")
HALF_FULL = ("gemma2", "gemma3_text", "gpt_oss")
# sdpa cannot cap logits or hold attention sinks
NO_SDPA = ("gemma2", "gpt_oss")
OLDEST = ("llama", "qwen3", "gemma2", "gpt_oss")
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.oldest] if name in OLDEST else []) for name in (*ALL_FULL, *HALF_FULL)
]


def greedy(model: PreTrainedModel, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Sequences [batch, tokens], logits [NEW_TOKENS, batch, vocabulary], and the cache that was used."""
    ids, mask = ragged_prompts(LENGTHS)
    result = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    assert result.sequences.shape[1] == max(LENGTHS) + NEW_TOKENS
    return result.sequences, torch.stack(result.logits), result.past_key_values


@pytest.mark.parametrize("name", FAMILIES)
def test_lossless_equals_dynamic_cache(name: str) -> None:
    model = tiny_model(name, "eager")
    reference = greedy(model, past_key_values=DynamicCache(config=model.config))
    if name not in NO_SDPA:
        model.set_attn_implementation("sdpa")
        assert_same(greedy(model, past_key_values=DynamicCache(config=model.config)), reference)

    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    given = greedy(model, past_key_values=cache)
    assert given[2] is cache
    assert_same(given, reference)
    assert_complete(cache, name)

    made = greedy(model, cache_implementation="diffkv", cache_config=DiffKVConfig.lossless().to_dict())
    assert_same(made, reference)
    assert_complete(made[2], name)


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compression_would_show(name: str) -> None:
    """The comparison above can fail: with compression the same models say something else."""
    model = tiny_model(name, "eager")
    reference = greedy(model, past_key_values=DynamicCache(config=model.config))
    compressed = greedy(model, cache_implementation="diffkv", cache_config={"alpha_high": 1.0, "alpha_low": 0.5})
    torch.testing.assert_close(compressed[1][0], reference[1][0], rtol=0, atol=1e-4)  # the prompt is read uncompressed
    assert (compressed[1][1] - reference[1][1]).abs().max() > 0.05
    assert not torch.equal(compressed[0], reference[0])


def assert_same(actual: tuple[Tensor, Tensor, Any], expected: tuple[Tensor, Tensor, Any]) -> None:
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-4)


def assert_complete(cache: Any, name: str) -> None:
    """All full-attention layers are compressed, and every token is stored, at the high level or in the window."""
    assert isinstance(cache, DiffKVCache)
    cache.check_integrity()
    compressed = list(range(LAYERS)) if name in ALL_FULL else [1]
    assert cache.compressed_layers() == compressed
    assert [isinstance(layer, DiffKVLayer) for layer in cache.layers] == [i in compressed for i in range(LAYERS)]
    seen = max(LENGTHS) + NEW_TOKENS - 1  # the last token was never fed back
    assert cache.get_seq_length() == seen
    positions = torch.arange(seen)
    padding = positions < max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    expected = torch.where(positions >= seen - cache.config.window, 3, 2).expand(len(LENGTHS), seen)
    expected = torch.where(padding, -1, expected).to(torch.int8)
    for layer_idx in compressed:
        levels = cache.levels(layer_idx)
        assert torch.equal(levels, expected[:, None].expand_as(levels))
