"""Captured decode steps of models with sliding-window layers alongside the compressed ones."""

from __future__ import annotations

import logging
from typing import Any

import interpreted  # noqa: F401
import pytest
import torch
from captured_steps import assert_alike, run
from recorded_graph import RecordedGraph
from tiny_models import ragged_prompts, tiny_model
from transformers import CompileConfig, PreTrainedModel

from hf_diffkv import DiffKVCache

pytestmark = [pytest.mark.usefixtures("recorded"), pytest.mark.slow]
SIZE = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}


def sliding_model(name: str, **options: Any) -> PreTrainedModel:
    """A layer with a window of six tokens, followed by a compressed layer."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    return tiny_model(name, "diffkv", **{**SIZE, **kinds, **options})


def assert_same_windows(cache: DiffKVCache, expected: DiffKVCache) -> None:
    assert torch.equal(cache.levels(1), expected.levels(1))
    assert cache.layers[0].cumulative_length == expected.layers[0].cumulative_length == cache.layers[1].seen
    assert torch.equal(cache.layers[0].keys, expected.layers[0].keys)
    assert torch.equal(cache.layers[0].values, expected.layers[0].values)
    assert not {"update", "get_seq_length", "get_mask_sizes"} & set(vars(cache.layers[0]))


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_the_same_text_and_windows(steps, name: str) -> None:
    model = sliding_model(name)
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # as on a GPU
    tokens, mask = ragged_prompts((10, 7))
    cache, eager = assert_alike(model, tokens, 9, attention_mask=mask)
    (step,) = steps
    assert step.captures == 1 and step.replays == 7
    assert_same_windows(cache, eager)


@pytest.mark.parametrize("padding, replays", [(False, 5), (True, 2)])
def test_a_window_that_fills_up_on_the_way(steps, padding: bool, replays: int) -> None:
    """Steps run from Python until it is full and each row has a token outside the exact ones, which fixes its offset;
    it may still contain padding by then."""
    model = sliding_model("qwen3")
    tokens, mask = ragged_prompts((4, 1 if padding else 4))
    cache, eager = assert_alike(model, tokens, 8, attention_mask=mask)
    assert steps[0].captures == 1 and steps[0].replays == replays
    assert_same_windows(cache, eager)


def test_a_compiled_forward(steps) -> None:
    torch._dynamo.reset()
    model = sliding_model("gemma2")
    tokens, mask = ragged_prompts((10, 7))
    asked = CompileConfig(backend="eager", fullgraph=True)
    cache, eager = assert_alike(model, tokens, 6, compile_config=asked, attention_mask=mask)
    assert steps[0].compiled and steps[0].captures == 1 and steps[0].replays == 4
    assert_same_windows(cache, eager)


def test_layers_of_another_kind_are_not_captured(steps, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A captured step would have to know their mask."""
    model = sliding_model("gemma2")
    tokens, mask = ragged_prompts((10, 7))
    expected, _ = run(model, False, tokens, 4, attention_mask=mask)
    monkeypatch.setattr("hf_diffkv.cache.captured_windows.LAYER_KINDS", {"full_attention", "chunked_attention"})
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        got, _ = run(model, True, tokens, 4, attention_mask=mask)
    assert torch.equal(got, expected)
    assert steps and not RecordedGraph.made and not caplog.records


def test_a_failed_warm_up_leaves_the_windows(steps, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    model = sliding_model("gemma2")
    tokens, mask = ragged_prompts((10, 7))
    expected, eager = run(model, False, tokens, 4, attention_mask=mask)
    forward = model.lm_head.forward

    def fails(hidden: torch.Tensor) -> torch.Tensor:
        if steps[0].cache.stores.rehearsing:
            raise RuntimeError("out of luck")
        return forward(hidden)

    monkeypatch.setattr(model.lm_head, "forward", fails)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        got, cache = run(model, True, tokens, 4, attention_mask=mask)
    assert torch.equal(got, expected)
    assert "out of luck" in caplog.text and not RecordedGraph.made[0].steps
    assert_same_windows(cache, eager)
