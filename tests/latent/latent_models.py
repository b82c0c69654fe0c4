"""Tiny models that cache latents, and what the tests compare."""

from __future__ import annotations

from typing import Any

import torch
from families import FAMILIES
from tiny_models import greedy, ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

LOSSLESS = DiffKVConfig.lossless(window=8)
LOSSY = DiffKVConfig(high="K8V4", low="K8V4", alpha_high=0.0, window=8)
LENGTHS = (40, 17, 5)


def latent_model(name: str = "glm4_moe_lite", **options: Any) -> PreTrainedModel:
    """A tiny model with sdpa attention."""
    return tiny_model(name, "sdpa", **{**FAMILIES[name].options, **options})


def dense(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def text(
    model: PreTrainedModel, cache: Any, tokens: int = 8, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> Any:
    """Greedy sequences [batch, tokens] and logits [tokens, batch, vocabulary]."""
    ids, mask = ragged_prompts(lengths)
    result = greedy(model, ids, mask, tokens, **passing(cache))
    return result.sequences, torch.stack(result.logits)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], atol: float = 1e-4) -> None:
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=atol)


def lossless(model: PreTrainedModel, **fields: Any) -> DiffKVCache:
    return DiffKVCache(model, LOSSLESS, **fields)
