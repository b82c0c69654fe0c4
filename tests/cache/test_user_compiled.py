"""Models compiled by the user, in `generate()` and in plain forwards, with the cache on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tiny_models import greedy, ragged_prompts, tiny_model
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, HandOverError, Precision
from hf_diffkv.cache.attention import diffkv_attention
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.compat import passing

CONFIG = DiffKVConfig(alpha_high=1.2, alpha_low=0.8, window=4, page_bytes=512)
LENGTHS = (40, 23, 31)


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()


def generate(model: PreTrainedModel, new: int = 8, config: DiffKVConfig = CONFIG) -> tuple[Tensor, Tensor, DiffKVCache]:
    """Text, logits and cache."""
    ids, mask = ragged_prompts(LENGTHS)
    cache = DiffKVCache(model.config, config)
    output = greedy(model, ids, mask, new, **passing(cache))
    return output.sequences, torch.stack(output.logits, 1), cache


def assert_same(actual: tuple, expected: tuple) -> None:
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])
    actual[2].check_integrity()
    for layer_idx in actual[2].compressed_layers():
        levels = actual[2].levels(layer_idx)
        assert torch.equal(levels, expected[2].levels(layer_idx))
        assert all((levels == level).any() for level in range(4))
        torch.testing.assert_close(actual[2].significance(layer_idx), expected[2].significance(layer_idx))


def forward(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    model.forward = torch.compile(model.forward, **options)
    return model


def in_place(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    model.compile(**options)
    return model


def wrapped(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    return torch.compile(model, **options)


def by_layer(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.compile(**options)
    return model


@pytest.mark.oldest
@pytest.mark.slow
def test_inductor_over_many_refreshes(compiler: None) -> None:
    """The steps of all layers run in order, with none left out; another cache compiles nothing anew."""
    model = tiny_model("llama", num_hidden_layers=3, dtype=torch.float64)
    # nothing is quantised, because slightly different rounding could give another code
    config = dataclasses.replace(CONFIG, high=Precision(16, 16), low=Precision(16, 16))
    expected = generate(model, 34, config)
    forward(model, fullgraph=True)
    assert_same(generate(model, 34, config), expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        generate(model, 10, config)


@pytest.mark.parametrize("compile_model", [forward, in_place, wrapped, by_layer], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_every_way_to_compile(name: str, compile_model: Callable) -> None:
    model = tiny_model(name, "diffkv")
    expected = generate(model)
    assert_same(generate(compile_model(model, backend="eager")), expected)


@pytest.mark.slow
def test_a_graph_that_breaks_before_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`update` is compiled, and the attention function runs from Python."""
    model = tiny_model("llama")
    expected = generate(model)
    calls = []
    attend = DiffKVLayer.attend

    def note(self: DiffKVLayer, *args: object) -> Tensor:
        calls.append(torch.compiler.is_compiling())
        return attend(self, *args)

    monkeypatch.setattr(DiffKVLayer, "attend", note)
    monkeypatch.setitem(AttentionInterface._global_mapping, "diffkv", torch.compiler.disable(diffkv_attention))
    assert_same(generate(forward(model, backend="eager")), expected)
    assert calls and not any(calls)


@pytest.mark.slow
def test_another_attention_function_is_found_out() -> None:
    model = forward(tiny_model("llama", "sdpa"), backend="eager")
    ids, mask = ragged_prompts((12,))
    cache = DiffKVCache(model.config, CONFIG)
    with torch.no_grad(), pytest.raises(HandOverError, match="never picked them up"):
        model(ids, attention_mask=mask, **passing(cache))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_graph_that_could_compute_gradients(name: str) -> None:
    """Compilers trace the backward pass ahead of time; only running it is refused."""
    model, (ids, mask) = tiny_model(name, "diffkv"), ragged_prompts((12, 9))
    expected = DiffKVCache(model.config, CONFIG)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, **passing(expected)).logits
    cache = DiffKVCache(model.config, CONFIG)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(ids, attention_mask=mask, **passing(cache)).logits
    torch.testing.assert_close(output.detach(), logits)
    with pytest.raises(RuntimeError, match="no gradient; train without a cache"):
        output.sum().backward()
    assert cache.get_seq_length() == 12 and model.lm_head.weight.grad is None
