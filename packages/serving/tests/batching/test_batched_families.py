"""Families whose layers keep states, in continuous batching: every request is what it would be by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, LINEAR
from hf_diffkv_serving.compat import BATCHING
from test_families import build
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.devices import TensorParallel
from hf_diffkv.cache.errors import HandOverError, UnsupportedModelError
from hf_diffkv.compat import passing

LENGTHS, NEW = (5, 150, 1, 70), 12
LOSSLESS = DiffKVConfig.lossless(window=8)
LOSSY = DiffKVConfig(alpha_high=1.0, alpha_low=0.4, window=16)
WITH_STATES = [
    name for name, family in FAMILIES.items() if LINEAR in family.kept and family.compressed and not family.latents
]

# bytes; holds about two requests of 150 tokens
TIGHT = 130_000

pytestmark = pytest.mark.skipif(not BATCHING.available(), reason="needs Transformers 5.23")
if BATCHING.available():
    from hf_diffkv_serving.batching import engine  # noqa: F401  looks at what is watched below
    from hf_diffkv_serving.batching.engine_cache import ContinuousCache


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]


def batched(
    model: PreTrainedModel, config: DiffKVConfig, tokens: int, max_bytes: int = 64 << 20, new: int = NEW, **more: Any
) -> list[list[int]]:
    wanted = GenerationConfig(
        cache_implementation="diffkv",
        cache_config={**config.to_dict(), "max_bytes": max_bytes},
        max_new_tokens=new,
        eos_token_id=-1,
        pad_token_id=0,
        **{"do_sample": False, **more},
    )
    options = ContinuousBatchingConfig(max_batch_tokens=tokens, safety_margin=0.0)
    outputs = model.generate_batch(prompts(), wanted, options)
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.sampled(10)
def test_batched_family(name: str) -> None:
    """Prompts in parts and whole, and nothing of the manager stays in the model."""
    model = build(name)

    def alone() -> list[list[int]]:
        given = [torch.tensor([ids]) for ids in prompts()]
        texts = [model.generate(ids, max_new_tokens=NEW, do_sample=False) for ids in given]
        return [text[0, ids.shape[1] :].tolist() for text, ids in zip(texts, given)]

    expected = alone()
    assert batched(model, LOSSLESS, 64) == expected
    assert alone() == expected
    if "num_experts" in FAMILIES[name].options:
        model.set_experts_implementation("eager")  # the grouped matmul knows no float64
    model.double()
    model.set_attn_implementation("diffkv")
    given = [torch.tensor([ids]) for ids in prompts()]
    texts = []
    for ids in given:
        cache = DiffKVCache(model.config, LOSSY)
        texts.append(model.generate(ids, max_new_tokens=NEW, do_sample=False, **passing(cache)))
    model.set_attn_implementation("eager")
    assert batched(model, LOSSY, 512) == [text[0, ids.shape[1] :].tolist() for text, ids in zip(texts, given)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("lfm2")


def test_states_are_copied_preempted_and_counted(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers to each prompt, of the likeliest tokens, where little memory is left for pages."""
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts()
        for _ in range(2)
    ]
    free, caches, preempted = ContinuousCache.free_blocks, set(), []

    def watched(cache: ContinuousCache, request_id: str, no_cache: bool = False) -> None:
        caches.add(cache)
        preempted.extend([request_id] if no_cache and request_id in cache._slot_of else [])
        free(cache, request_id, no_cache)

    monkeypatch.setattr(ContinuousCache, "free_blocks", watched)
    assert batched(model, LOSSLESS, 64, TIGHT, 40, num_return_sequences=2, do_sample=True, top_k=1) == expected
    assert preempted
    (cache,) = caches
    # three inputs of the convolution in each of 64 channels, four bytes each
    assert cache.linear.bytes == cache.slots.count * 64 * 3 * 4
    assert cache.linear.bytes < cache.bytes <= cache.peak_bytes <= TIGHT
    assert cache.slots.idle == cache.slots.count > 2


def test_the_model_beside_its_manager(model: PreTrainedModel) -> None:
    forwards = [module.forward for module in model.modules()]
    wanted = GenerationConfig(cache_implementation="diffkv", cache_config={"max_bytes": TIGHT})
    manager = model.init_continuous_batching(wanted)
    with pytest.raises(HandOverError, match="alongside the manager"):
        model(torch.tensor([[3, 4, 5]]))
    with pytest.raises(ValueError, match="linear attention"):
        manager.use_prefixes(object())
    manager.stop()
    assert [module.forward for module in model.modules()] == forwards
    model(torch.tensor([[3, 4, 5]]))


def test_a_manager_that_cannot_be_made_leaves_the_model(model: PreTrainedModel) -> None:
    forwards = [module.forward for module in model.modules()]
    with pytest.raises(MemoryError):
        batched(model, LOSSLESS, 64, 100)
    assert [module.forward for module in model.modules()] == forwards


def test_modules_that_do_more_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].conv)
    forward = kind.forward

    def more(self: Any, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        return forward(self, hidden_states, cache), cache.update_conv_state

    monkeypatch.setattr(kind, "forward", more)
    with pytest.raises(UnsupportedModelError, match="returns more than hidden states"):
        batched(model, LOSSLESS, 64)


@pytest.mark.parametrize("name", ["falcon_h1", "zamba", "zamba2", "zaya"])
def test_two_kinds_in_one_layer_are_refused(name: str) -> None:
    """Refuses such a model with the reason, before anything is changed."""
    refused = build(name)
    attention = refused.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="one layer.*LinearAttentionAndFullAttentionLayer"):
        batched(refused, LOSSLESS, 64)
    assert refused.config._attn_implementation == attention


def test_states_over_ranks_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "of", lambda model: TensorParallel(0, 2))
    with pytest.raises(UnsupportedModelError, match="tensor parallelism.*not about states"):
        batched(model, LOSSLESS, 64)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_latents_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="caches latents"):
        batched(build(name), LOSSLESS, 64)
