"""What importing the package adds to Transformers, the rest of which works as before."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.generation.configuration_utils as generation_configuration
from programs import run_program
from tiny_models import PAD, greedy, ragged_prompts, tiny_model
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation.utils import GenerationMixin

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.compat import passing

LENGTHS = (100, 31)
FIELDS = {"alpha_high": 1.5, "alpha_low": 0.25, "window": 32}
# baseline for each model: sdpa supports neither soft-capping nor attention sinks
STOCK = {"llama": "sdpa", "qwen3_moe": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}


def generate(model: PreTrainedModel, **options: Any) -> Any:
    return greedy(model, *ragged_prompts(LENGTHS), 12, **options)


# registration


@pytest.fixture
def unregistered() -> Iterator[None]:
    hf_diffkv.unregister()
    yield
    hf_diffkv.register()


def registered_names() -> list[bool]:
    return [
        "diffkv" in AttentionInterface().valid_keys(),
        "diffkv" in AttentionMaskInterface().valid_keys(),
        "diffkv" in generation_configuration.ALL_CACHE_IMPLEMENTATIONS,
    ]


SNAPSHOT = """
import transformers.generation.configuration_utils as configuration
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.utils import GenerationMixin

def snapshot():
    return (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        configuration.ALL_CACHE_IMPLEMENTATIONS,
        dict(vars(GenerationMixin)),
    )

before = snapshot()
import hf_diffkv
assert snapshot() != before
hf_diffkv.unregister()
after = snapshot()
assert after == before, (after, before)
assert type(after[2]) is type(before[2])
assert all(after[3][name] is method for name, method in before[3].items())
"""


@pytest.mark.oldest
@pytest.mark.slow
def test_unregister_leaves_transformers_as_it_was_before_the_import() -> None:
    run_program(SNAPSHOT)


def test_unregister_and_register_again(unregistered: None) -> None:
    model = tiny_model("llama")
    assert registered_names() == [False] * 3
    assert not hasattr(GenerationMixin._prepare_cache_for_generation, "__wrapped__")
    with pytest.raises(ValueError, match="cache_implementation"):
        GenerationConfig(cache_implementation="diffkv")
    with pytest.raises(ValueError, match="diffkv"):
        tiny_model("llama", "diffkv")
    hf_diffkv.unregister()
    expected = generate(model).sequences
    hf_diffkv.register()
    assert registered_names() == [True] * 3
    given = generate(model, cache_implementation="diffkv", cache_config=DiffKVConfig.lossless().to_dict())
    assert isinstance(given.past_key_values, DiffKVCache)
    assert torch.equal(given.sequences, expected)


def test_registering_and_importing_twice_changes_nothing() -> None:
    method = GenerationMixin._prepare_cache_for_generation
    names = generation_configuration.ALL_CACHE_IMPLEMENTATIONS
    hf_diffkv.register()
    importlib.reload(hf_diffkv)
    assert GenerationMixin._prepare_cache_for_generation is method
    assert not hasattr(method.__wrapped__, "__wrapped__")
    assert generation_configuration.ALL_CACHE_IMPLEMENTATIONS == names
    assert list(names).count("diffkv") == 1


# generate() and what is built on it


@pytest.mark.oldest
def test_generate_makes_the_cache_that_cache_config_describes() -> None:
    model = tiny_model("llama")
    before = model.generation_config.to_dict()
    result = generate(model, cache_implementation="diffkv", cache_config=FIELDS)
    assert isinstance(result.past_key_values, DiffKVCache)
    assert result.past_key_values.config == DiffKVConfig(**FIELDS)
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.to_dict() == before
    given = DiffKVCache(model.config, **FIELDS)
    for options in ({}, {"cache_implementation": "diffkv"}):
        given.reset()
        again = generate(model, **passing(given), **options)
        assert again.past_key_values is given
        assert torch.equal(torch.stack(again.logits), torch.stack(result.logits))


def test_without_fields_the_models_preset_is_taken() -> None:
    model = tiny_model("llama")
    model.config._name_or_path = "meta-llama/Meta-Llama-3-8B"
    result = generate(model, cache_implementation="diffkv")
    assert result.past_key_values.config == DiffKVConfig(alpha_high=1.0, alpha_low=0.02)


def test_generation_config_saved_and_reloaded(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = generate(model, cache_implementation="diffkv", cache_config=FIELDS)
    GenerationConfig(cache_implementation="diffkv", cache_config=FIELDS, pad_token_id=PAD).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.cache_implementation == "diffkv" and loaded.cache_config == FIELDS
    result = generate(model, generation_config=loaded)
    assert result.past_key_values.config == DiffKVConfig(**FIELDS)
    assert torch.equal(torch.stack(result.logits), torch.stack(expected.logits))
    assert loaded.cache_implementation == "diffkv"


@pytest.mark.oldest
def test_precisions_of_a_saved_generation_config(tmp_path: Path) -> None:
    model = tiny_model("llama")
    fields = {"high": Precision(8, 4, 1, 2), "low": Precision(4, 2)}
    GenerationConfig(cache_implementation="diffkv", cache_config=fields, pad_token_id=PAD).save_pretrained(tmp_path)
    result = generate(model, generation_config=GenerationConfig.from_pretrained(tmp_path))
    assert result.past_key_values.config == DiffKVConfig.for_model(model, **fields)


def test_a_model_saved_with_its_generation_config(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = generate(model, cache_implementation="diffkv", cache_config=FIELDS)
    model.generation_config.cache_implementation = "diffkv"
    model.generation_config.cache_config = {**FIELDS, "high": (8, 4), "low": {"k_bits": 4, "v_bits": 2}}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    result = generate(loaded)
    assert result.past_key_values.config == DiffKVConfig(**FIELDS)
    assert torch.equal(torch.stack(result.logits), torch.stack(expected.logits))


# a model left on "diffkv"


def loss_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    ids, mask = ragged_prompts(LENGTHS)
    # what a padding query sees is implementation-defined, so the first real token is not predicted from one
    predicted = mask.bool() & mask.roll(1, dims=1).bool()
    model.train()
    loss = model(ids, attention_mask=mask, labels=torch.where(predicted, ids, -100)).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", STOCK)
def test_training_is_unchanged(name: str) -> None:
    expected_loss, expected = loss_and_gradients(tiny_model(name, STOCK[name]))
    loss, gradients = loss_and_gradients(tiny_model(name, "diffkv"))
    torch.testing.assert_close(loss, expected_loss)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("kind", ["default", "dynamic", "static", "none"])
def test_other_caches_are_unchanged(name: str, kind: str) -> None:
    def options(model: PreTrainedModel) -> dict[str, Any]:
        if kind == "dynamic":
            return passing(DynamicCache(config=model.config))
        if kind == "static":
            return passing(StaticCache(config=model.config, max_cache_len=128))
        return {"use_cache": False} if kind == "none" else {}

    model = tiny_model(name, STOCK[name])
    expected = generate(model, **options(model))
    model.set_attn_implementation("diffkv")
    result = generate(model, **options(model))
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)
