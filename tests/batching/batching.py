"""What tests of continuous batching share: prompts, options, and what `generate()` says."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCABULARY
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_diffkv import DiffKVConfig

LENGTHS = (5, 150, 80, 1, 12, 64, 190, 90)
NEW = 12
LOSSY = DiffKVConfig(alpha_high=1.0, alpha_low=0.4, window=16)
LOSSLESS = DiffKVConfig.lossless(window=8)
# bytes; the smaller one holds about two requests of 70 tokens
AMPLE, TIGHT = 64 << 20, 130_000


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def request_config(config: DiffKVConfig, max_bytes: int | None = AMPLE, **options: Any) -> GenerationConfig:
    fields = {**config.to_dict(), "max_bytes": max_bytes}
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(cache_implementation="diffkv", cache_config=fields, **{**given, **options})


def chunks(tokens: int = 64, **options: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(max_batch_tokens=tokens, **options)


def expected(model: PreTrainedModel, ids: list[int], new: int = NEW) -> list[int]:
    """What `generate()` says, with Transformers' own cache."""
    return model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()
