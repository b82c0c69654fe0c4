"""Plans from a configuration, compared with what real caches hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from hf_diffkv import DiffKVCache, DiffKVConfig, planning
from hf_diffkv.compat import passing
from hf_diffkv.planning import ModelShape, longest, plan_budget, stored_weight_bytes
from hf_diffkv.running.models import TINY_LM

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "sliding": Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=TYPES),
    "experts": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}
TOKENS = 300
# final precisions of layers that begin with K8V8, K6V5 and K8V8
BY_HEAD = (("K4V3", "K4V3"), ("K6V5", "K3V2"), ("K4V3", "K8V8"), ("K4V2", "K4V2"))


def run(config: Any, cache: Any, attention: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        model(torch.randint(0, 64, (1, TOKENS)), **passing(cache), use_cache=True)
    return model


def tensor_bytes(cache: DynamicCache, window: int | None) -> int:
    """Returns the bytes of keys and values. A sliding layer counts only what it will keep."""
    total = 0
    for layer in cache.layers:
        kept = TOKENS if not hasattr(layer, "sliding_window") else min(TOKENS, layer.sliding_window)
        total += 2 * layer.keys[:, :, :kept].numel() * layer.keys.element_size()
        assert not hasattr(layer, "sliding_window") or layer.sliding_window == window
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_dense_bytes_and_weights_are_those_of_the_model(name: str) -> None:
    config = CONFIGS[name]
    shape = ModelShape.of(config, "no/such-model")
    cache = DynamicCache(config=config)
    model = run(config, cache, "sdpa")
    window = 16 if name == "sliding" else None
    fixed = sum(layer.fixed_bytes for layer in shape.layers)
    # counters of sliding layers at most
    assert 0 <= fixed <= 64
    assert shape.dense_bytes(TOKENS) - fixed == pytest.approx(tensor_bytes(cache, window), rel=0.02 if window else 0)
    assert shape.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(shape.compressed) == len(DiffKVCache(config).compressed_layers()) == (2 if window else 4)
    assert shape.limit == 512


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_diffkv_bytes_are_those_of_a_cache(name: str, share: float) -> None:
    alpha = 0.0 if share else 1e9
    config = DiffKVConfig(alpha_high=alpha, alpha_low=0.0, window=20, center=True)
    cache = DiffKVCache(CONFIGS[name], config)
    run(CONFIGS[name], cache, "diffkv")
    memory = cache.memory()
    planned = ModelShape.of(CONFIGS[name], "no/such-model").diffkv_bytes(TOKENS, config, share)
    rows = 2 * len(cache.compressed_layers())
    page = cache.stores.all[0].layout.page_bytes
    # a spare page per row is planned for the tokens to come; a store has a null page and some counters
    held = memory.bytes
    assert held - 2 * page <= planned <= held + (rows + 1) * page


@pytest.mark.parametrize(
    "name, batch, max_bytes, preset, fields",
    [
        ("llama", 1, 200_000, "balanced", {}),
        ("llama", 3, 450_000, "small", {"window": 20, "page_bytes": 512}),
        ("sliding", 1, 90_000, "balanced", {"adaptive_rounding": False, "center": False}),
        ("llama", 1, 200_000, "balanced", {"head_precisions": BY_HEAD}),
        ("llama", 2, 300_000, "balanced", {"head_precisions": BY_HEAD, "window": 20}),
    ],
)
def test_budgets_fill_where_it_is_planned(name: str, batch: int, max_bytes: int, preset: str, fields: dict) -> None:
    """A prompt of one token fewer lowers nothing; one of one token more than the room does not fit."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    model.set_attn_implementation("diffkv")
    config = DiffKVConfig.preset(preset, max_bytes=max_bytes, **fields)

    def lowered(tokens: int) -> int:
        cache = DiffKVCache(CONFIGS[name], config)
        with torch.no_grad():
            model(torch.zeros(batch, tokens, dtype=torch.int64), **passing(cache), use_cache=True)
        return sum(store.stage * store.low_heads.numel() + int(store.low_heads.sum()) for store in cache.stores.all)

    plan = plan_budget(ModelShape.of(CONFIGS[name], "no/such-model"), config, batch, moments=False)
    by_head = config.head_precisions is not None
    assert plan.precise == "K8V8" and plan.max_bytes == config.max_bytes
    assert plan.final == ("K4V3/K4V2/K3V2" if by_head else config.high.full_name)
    assert 100 < plan.lowering_begins < plan.room_ends < 512
    assert lowered(plan.lowering_begins - 1) == 0 < lowered(plan.lowering_begins) < lowered(plan.room_ends)
    with pytest.raises(MemoryError, match="with all tokens at"):
        lowered(plan.room_ends + 1)
    # step by step it is within a page of tokens, and what room is made ahead for
    cache, begins = DiffKVCache(CONFIGS[name], config), None
    with torch.no_grad(), pytest.raises(MemoryError):
        model(torch.zeros(batch, plan.lowering_begins - 60, dtype=torch.int64), **passing(cache), use_cache=True)
        while True:
            model(torch.zeros(batch, 1, dtype=torch.int64), **passing(cache), use_cache=True)
            if begins is None and any(store.low_heads.any() for store in cache.stores.all):
                begins = cache.get_seq_length()
    page = max(store.layout.low.capacity + store.refresh_steps for store in cache.stores.all)
    assert abs(begins - plan.lowering_begins) <= page
    assert abs(cache.get_seq_length() - plan.room_ends) <= page


def test_nothing_is_planned_where_tokens_are_chosen() -> None:
    shape = ModelShape.of(CONFIGS["llama"], "no/such-model")
    for config in (
        DiffKVConfig.preset("balanced"),
        DiffKVConfig.preset("balanced", max_bytes=10**6, until_full=None),
        DiffKVConfig(high="K8V4", low="K4V2", max_bytes=10**6),
    ):
        assert plan_budget(shape, config, 1, moments=False) is None


def test_diffkv_bytes_of_a_precision_for_each_head() -> None:
    heads = (("K8V4", "K3V3"), ("K4V2", "K4V2"), None, None)
    config = DiffKVConfig(head_precisions=heads, alpha_high=0.0, window=20)
    cache = DiffKVCache(CONFIGS["llama"], config)
    run(CONFIGS["llama"], cache, "diffkv")
    planned = ModelShape.of(CONFIGS["llama"], "no/such-model").diffkv_bytes(TOKENS, config, 0.5)
    pages = [store.layout.page_bytes for store in cache.stores.all]
    assert cache.memory().bytes - 2 * sum(pages) <= planned <= cache.memory().bytes + 9 * max(pages)
    with pytest.raises(ValueError, match="head_precisions has 4 entries but 2 layers"):
        ModelShape.of(CONFIGS["sliding"], "no/such-model").diffkv_bytes(TOKENS, config, 0.5)


def test_shapes_by_name_are_those_by_running() -> None:
    for name in ("llama", "sliding"):
        config = CONFIGS[name]
        running = planning._shapes_by_running(planning.without_weights(config, torch.float32), config)
        named = planning._shapes_by_name(config)
        plain = [(s.num_key_value_heads, s.key_dim, s.value_dim, s.window, s.compressed) for s in running]
        assert plain == [(s.num_key_value_heads, s.key_dim, s.value_dim, s.window, s.compressed) for s in named]


def test_weights_are_those_of_the_files() -> None:
    config = AutoConfig.from_pretrained(TINY_LM)
    size = (TINY_LM / "model.safetensors").stat().st_size
    assert ModelShape.of(config, str(TINY_LM)).weight_bytes == stored_weight_bytes(str(TINY_LM)) == size
    # in another dtype they are counted
    doubled = ModelShape.of(config, str(TINY_LM), torch.float32)
    assert 2 * size * 0.99 < doubled.weight_bytes <= 2 * size and doubled.dtype == torch.float32
    assert stored_weight_bytes(str(Path(__file__).parent)) is None


@pytest.mark.parametrize("most, bound, expected", [(10, 7, 7), (10, 10, 10), (10, 99, 10), (10, 0, 0), (0, 5, 0)])
def test_longest(most: int, bound: int, expected: int) -> None:
    assert longest(lambda number: number <= bound, most) == expected
