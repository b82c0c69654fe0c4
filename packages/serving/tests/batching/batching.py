"""Helpers of the tests of continuous batching: prompts, options, and answers of `generate()`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hf_diffkv_serving.batching.slots import Slots
from tiny_models import VOCABULARY
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_diffkv import DiffKVConfig
from hf_diffkv.store import check_integrity, read_tokens

LENGTHS = (5, 150, 80, 1, 12, 64, 190, 90)
NEW = 12
LOSSY = DiffKVConfig(alpha_high=1.0, alpha_low=0.4, window=16)
LOSSLESS = DiffKVConfig.lossless(window=8)
# of two layers with two KV heads, in a store each: both lossless, one without scores, one with levels that differ
SEVERAL = DiffKVConfig.lossless(window=8, low="K8V8", alpha_high=1e-9, head_precisions=[["K16V16", "K16V16g1/2"], None])
MIXED = replace(LOSSY, head_precisions=[["K8V4", "K4V2"], None])
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


def expected(model: PreTrainedModel, ids: list[int], new: int = NEW, **options: Any) -> list[int]:
    """Returns the answer of `generate()`, with Transformers' own cache unless another one is given."""
    given = {"max_new_tokens": new, "do_sample": False, **options}
    return model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()


def levels_of(slots: Slots, slot: int) -> list[torch.Tensor]:
    """Returns the levels of each layer, int8 [1, heads, seen] like a cache's."""
    held = [(store, place) for store in slots.held(slot) for place in range(store.num_layers)]
    levels = {store.layers[place]: read_tokens(store, place).levels for store, place in held}
    return [levels[layer] for layer in sorted(levels)]


def check_slots(slots: Slots) -> None:
    """Between two forwards every page is free or has owners, and none is promised to anybody."""
    slots.settle()
    for part in slots.parts:
        check_integrity(part.store)
        owned = part.store.owned_pages()
        assert sum(part.held(slot) for slot in range(slots.count)) == owned.numel()
        assert part.reservations.unreserved == part.store.pool.max_pages - 1 - owned.unique().numel()


def check_empty(slots: Slots) -> None:
    """No request is there, nor anything of one."""
    check_slots(slots)
    assert slots.idle == slots.count
    for part in slots.parts:
        assert part.store.owned_pages().numel() == 0 and not part.store.length.any()
