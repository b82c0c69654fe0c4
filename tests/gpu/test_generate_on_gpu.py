"""Every mode of `generate()` on a GPU, caches with a budget, and caches that leave the device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from given_stores import attend_prompt, new_store
from test_models_on_gpu import build
from tiny_models import tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import begin_forward

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "several samples": {**SAMPLED, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7},
    "sampled beams": {**SAMPLED, "num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "chunks": {"prefill_chunk_size": 64},
}
BATCHED = {"greedy", "sampled", "beams", "several beams"}


def prompt(device: torch.device, batch: int = 1, length: int = 200) -> dict[str, torch.Tensor]:
    """Ids and mask; the second request has padding, and all repeat themselves so that lookups find something."""
    ids = torch.randint(3, 256, (batch, length // 2), generator=torch.Generator().manual_seed(5)).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[1:, :50] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options})


@pytest.mark.parametrize("mode, batch", [(mode, n) for mode in MODES for n in ((1, 3) if mode in BATCHED else (1,))])
def test_every_mode_gives_the_text_of_a_dense_cache(device, mode: str, batch: int) -> None:
    model, inputs = build(torch.float32).to(device), prompt(device, batch)
    expected = generate(model, inputs, **MODES[mode])
    fields = DiffKVConfig.lossless(window=16).to_dict()
    got = generate(model, inputs, cache_implementation="diffkv", cache_config=fields, **MODES[mode])
    assert torch.equal(got, expected)


def test_an_assistant_drafts(device) -> None:
    model, assistant, inputs = build(torch.float32).to(device), build(torch.float32).to(device), prompt(device)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.02 * torch.randn_like(assistant.lm_head.weight))
    expected = generate(model, inputs)
    got = generate(
        model, inputs, assistant_model=assistant, **passing(DiffKVCache(model.config, DiffKVConfig.lossless(window=16)))
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_budgets_are_kept(device, kind: str, length: int = 3000, steps: int = 60) -> None:
    """float32; rows leave the first precision on the way, and what follows is as exact as its precisions."""
    # so that scratch memory is small beside the tokens
    wide = {"vocab_size": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32}
    wide |= {"num_hidden_layers": 6, "first_k_dense_replace": 6}
    model = (build(torch.float32) if kind == "heads" else tiny_model("deepseek_v3", **wide)).to(device)
    tokens = torch.randint(3, 256, (8, length + steps), generator=torch.Generator().manual_seed(4)).to(device)
    levels = {"high": "K8V4", "low": "K8V4"} if kind == "latents" else {}
    fields = {"window": 16, "page_bytes": 512, **levels}
    first, last = DiffKVConfig.preset("balanced", **{**fields, "high": "K8V8", "low": "K8V8"}), "balanced"

    def run(cache: DiffKVCache | DynamicCache) -> tuple[torch.Tensor, list[int]]:
        compressed = isinstance(cache, DiffKVCache)
        model.set_attn_implementation("diffkv" if compressed else "sdpa")
        found, lowered = [], []
        with torch.no_grad():
            for given in (tokens[:, :length], *tokens[:, length:].split(1, dim=1)):
                found.append(model(given, **passing(cache), logits_to_keep=1).logits[:, -1])
                lowered += [cache.memory().lowered] if compressed else []
        if compressed:
            cache.check_integrity()
        return torch.stack(found), lowered

    dense, _ = run(DynamicCache(config=model.config))
    errors, held = [], []
    for config in (first, DiffKVConfig.preset(last, **fields)):
        got, _ = run(cache := DiffKVCache(model.config, config))
        errors.append(float((got - dense).norm() / dense.norm()))
        held.append(cache.memory().compressed_bytes)
    # scratch memory counts as well, which depends on the device
    for max_bytes in range(held[1], 4 * held[0], held[1] // 20):
        config = DiffKVConfig.preset(last, max_bytes=max_bytes, until_full="K8V8", **fields)
        try:
            got, lowered = run(cache := DiffKVCache(model.config, config))
        except MemoryError:
            continue
        break
    assert cache.memory().compressed_bytes <= max_bytes
    low = torch.cat([store.low_heads.flatten() for store in cache.stores.all])
    assert low.any() and lowered == sorted(lowered)
    assert float((got - dense).norm() / dense.norm()) < 1.2 * errors[1] and errors[0] < errors[1]


def test_caches_that_leave_the_device(device, tmp_path: Path) -> None:
    """A cache saved on the GPU goes on there, and on the CPU, as if it had stayed."""
    model, inputs = build(torch.float32).to(device), prompt(device, 2)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16))
    with torch.no_grad():
        model(**inputs, **passing(cache))
        cache.save_pretrained(tmp_path, model)
        token = inputs["input_ids"][:, :1]
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(token)], dim=1)
        expected = model(token, attention_mask=mask, **passing(copy.deepcopy(cache))).logits
        loaded = DiffKVCache.from_pretrained(tmp_path, model)
        assert torch.equal(model(token, attention_mask=mask, **passing(loaded)).logits, expected)
        model = model.cpu()
        loaded = DiffKVCache.from_pretrained(tmp_path, model)
        got = model(token.cpu(), attention_mask=mask.cpu(), **passing(loaded)).logits
    assert float((got - expected.cpu()).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("high", ["K16V16", "K8V4"])
def test_infinite_prompts_are_refused(device, side: str, high: str) -> None:
    config = DiffKVConfig.preset("balanced", high=high, low=high)
    store = new_store(config, 1, 1, 1, 64, 64, torch.bfloat16, device)
    shapes = {"query": (1, 2, 90, 64), "key": (1, 1, 90, 64), "value": (1, 1, 90, 64)}
    states = {name: torch.randn(shape).to(device, torch.bfloat16) for name, shape in shapes.items()}
    states[side][:, :, 3, 2] = float("inf")
    with use_backend("kernels"):
        begin_forward(store, 90)
        attend_prompt(store, 0, *states.values(), softmax=Softmax(0.125))
        with pytest.raises(ValueError, match="NaN, infinite or beyond"):
            store.look()
