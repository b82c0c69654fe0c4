"""Whole models with a compressed cache against the same models computing DiffKV densely (`LayerSimulation`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import THRESHOLDS
from simulated_attention import SimulatedAttention, simulated
from tiny_models import VOCABULARY, greedy, ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.compat import passing

LENGTHS = (1, 2, 63, 64, 65, 128, 192, 300)
NEW_TOKENS = 150
CONFIGS = {name: DiffKVConfig(**thresholds) for name, thresholds in THRESHOLDS.items()}
OLDER_TURN, NEWER_TURN = 40, 30


def generate(
    model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor, tokens: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Greedy sequences [batch, seen] and float32 logits [tokens, batch, vocabulary]."""
    result = greedy(model, ids, mask, tokens, **passing(cache), **options)
    return result.sequences, torch.stack(result.logits)


def assert_go_on_alike(model: PreTrainedModel, caches: list[DiffKVCache], text: Tensor, mask: Tensor) -> None:
    """Checks that a second call gives each cache's text; mask: of the prompts that `text` begins with."""
    mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    (sequences, logits), *others = (generate(model, cache, text, mask, 20) for cache in caches)
    assert all(torch.equal(sequences, other[0]) and torch.equal(logits, other[1]) for other in others)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-5)


def assert_same_state(cache: DiffKVCache, simulation: SimulatedAttention, least: int) -> None:
    """Compares levels, keys, values and sums of each compressed layer, with at least `least` tokens per level."""
    cache.check_integrity()
    assert cache.compressed_layers() == sorted(simulation.layers)
    for layer_idx, layer in simulation.layers.items():
        levels = cache.levels(layer_idx)
        assert torch.equal(levels, layer.levels())
        keys, values, stored = cache.dequantize(layer_idx)
        expected_keys, expected_values, expected_stored = layer.stored()
        assert torch.equal(stored, expected_stored)
        torch.testing.assert_close(keys, expected_keys, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values, expected_values, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(cache.significance(layer_idx), layer.sums(), rtol=1e-5, atol=1e-6)
        counts = [int((levels == level).sum()) for level in range(4)]
        assert min(counts) >= least, counts


def assert_generates_as_simulated(
    model: PreTrainedModel, config: DiffKVConfig, prompts: tuple[Tensor, Tensor], new: int, least: int, **options: Any
) -> tuple[DiffKVCache, Tensor]:
    """Compares text and logits after prompts and mask, and what is then stored; returns the cache and the text."""
    with simulated(model, config) as simulation:
        expected = generate(model, DynamicCache(config=model.config), *prompts, new, **options)
    cache = DiffKVCache(model.config, config)
    assert_same(generate(model, cache, *prompts, new, **options), expected)
    assert_same_state(cache, simulation, least)
    return cache, expected[0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_generation_equals_the_simulation(name: str) -> None:
    model, prompts = tiny_model(name, dtype=torch.float64, attention="eager"), ragged_prompts(LENGTHS)
    _, expected = assert_generates_as_simulated(model, CONFIGS[name], prompts, NEW_TOKENS, least=50)
    exact, _ = generate(model, DynamicCache(config=model.config), *prompts, NEW_TOKENS)
    assert not torch.equal(exact, expected), "compression changed nothing, so this comparison proves nothing"


def assert_turns(
    model: PreTrainedModel, cache: DiffKVCache, lengths: tuple[int, ...], further: tuple[int, ...], least: int
) -> Tensor:
    """Compares two turns with the simulation; if the second ones differ in length, padding is inside the sequences.

    Returns the logits of the first.
    """
    ids, mask = ragged_prompts(lengths)
    more, more_mask = ragged_prompts(further, seed=1)

    def talk(cache: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        first = generate(model, cache, ids, mask, OLDER_TURN)
        both = torch.cat([first[0], more], 1)
        both_mask = torch.cat([mask, torch.ones(len(lengths), OLDER_TURN, dtype=mask.dtype), more_mask], 1)
        return first, generate(model, cache, both, both_mask, NEWER_TURN)

    with simulated(model, cache.config) as simulation:
        expected = talk(DynamicCache(config=model.config))
    for actual, turn in zip(talk(cache), expected):
        assert_same(actual, turn)
    assert_same_state(cache, simulation, least)
    return expected[0][1]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(100)
def test_a_second_turn_equals_the_simulation(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64, attention="eager")
    assert_turns(model, DiffKVCache(model.config, CONFIGS[name]), LENGTHS, (5, 1, 64, 17, 9, 70, 2, 33), least=50)


OTHER_CONFIGS = [
    pytest.param(
        DiffKVConfig(alpha_high=((1.0, 0.3), (0.9, 2.0)), alpha_low=((0.5, 0.3), (0.1, 1.0)), window=32),
        id="thresholds per layer and head",
    ),
    pytest.param(DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16, observation_window=24), id="observation"),
    pytest.param(
        DiffKVConfig(Precision(8, 4, 1, 2), Precision(4, 2, 2, 4), alpha_high=1.0, alpha_low=0.5, window=1),
        id="groups",
    ),
]


@pytest.mark.parametrize("config", OTHER_CONFIGS)
@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.sampled(100)
def test_configurations_and_chunked_prompts(config: DiffKVConfig, chunk: int | None) -> None:
    model = tiny_model("llama", dtype=torch.float64, attention="eager")
    prompts = ragged_prompts((130, 1, 77, 16))
    assert_generates_as_simulated(model, config, prompts, 40, least=8, prefill_chunk_size=chunk)


def test_rows_that_pause_equal_the_simulation() -> None:
    """Runs single steps in which some rows have only padding, like a batch of requests with different speeds."""
    model, config = tiny_model("llama", dtype=torch.float64, attention="eager"), CONFIGS["llama"]
    ids, mask = ragged_prompts((90, 1, 64, 130))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (4, 60), generator=generator)
    goes_on = torch.rand(4, 60, generator=generator) > torch.tensor([0.0, 0.3, 0.5, 0.9])[:, None]
    whole_mask = torch.cat([mask, goes_on.long()], 1)

    @torch.no_grad()
    def run(cache: Any) -> Tensor:
        logits = []
        for step in torch.cat([ids, tokens], 1).split([ids.shape[1]] + [1] * tokens.shape[1], dim=1):
            seen = whole_mask[:, : cache.get_seq_length() + step.shape[1]]
            positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -step.shape[1] :]
            output = model(step, attention_mask=seen, position_ids=positions, **passing(cache))
            logits.append(output.logits[:, -1])
        return torch.stack(logits, 1)  # [batch, 1 + steps, vocabulary]

    with simulated(model, config) as simulation:
        expected = run(DynamicCache(config=model.config))
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, config)
    real = torch.cat([torch.ones(4, 1, dtype=torch.bool), goes_on], 1)
    torch.testing.assert_close(run(cache)[real], expected[real], rtol=1e-5, atol=1e-5)
    assert_same_state(cache, simulation, least=35)
