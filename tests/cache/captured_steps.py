"""A tiny model whose decode steps are captured, and runs of it through `generate()`."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import greedy, tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

FIELDS = {"alpha_high": 1.1, "alpha_low": 0.5, "window": 3, "sinks": 1, "page_bytes": 512}
# for three layers of two KV heads: a pair, one precision, and thresholds
HEAD_PRECISIONS = [["K8V4", "K4V2"], ["K8V8", "K8V8"], None]


def build(layers: int, **options: object) -> PreTrainedModel:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
    return tiny_model("llama", **{"num_attention_heads": 2, "num_key_value_heads": 1, **sizes, **options})


def generate(model, tokens: torch.Tensor, cache: DiffKVCache, new: int, **options: object) -> torch.Tensor:
    mask = options.pop("attention_mask", torch.ones_like(tokens))
    return greedy(model, tokens, mask, new, **passing(cache), **options)


def run(model, captured: bool, tokens: torch.Tensor, new: int, fields: dict | None = None, **options: object):
    cache = DiffKVCache(model.config, DiffKVConfig(**{**FIELDS, "cuda_graphs": captured, **(fields or {})}))
    output = generate(model, tokens, cache, new, **options)
    cache.check_integrity()
    return torch.stack(output.logits, 1), cache


def padded(seed: int, padding: int, count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the second of which begins with padding, and their mask."""
    tokens = torch.randint(0, 96, (2, count), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    return tokens, mask


def assert_alike(
    model, tokens: torch.Tensor, new: int, fields: dict | None = None, compile_config: Any = None, **options: object
) -> tuple[DiffKVCache, DiffKVCache]:
    """Checks that captured (or compiled) steps give the text of steps from Python; returns both caches."""
    expected, eager = run(model, False, tokens, new, fields, **options)
    options |= {"compile_config": compile_config} if compile_config else {}
    got, cache = run(model, True, tokens, new, fields, **options)
    assert torch.equal(got, expected)
    return cache, eager


def assert_same_levels(cache: DiffKVCache, expected: DiffKVCache) -> None:
    """Compares sums as well."""
    for index in cache.compressed_layers():
        assert torch.equal(cache.levels(index), expected.levels(index))
        assert torch.equal(cache.significance(index), expected.significance(index))
