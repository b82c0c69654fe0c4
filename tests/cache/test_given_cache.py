"""The cache given to `generate()` is the one that the model uses, or an error says why not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.errors import CacheNotUsedError
from hf_diffkv.compat import CACHE_NAMES, passed, passing

# length past which these models rotate keys by other factors, and recompute all of it
BOUND = 64
NEW = 12
LOSSLESS = DiffKVConfig.lossless(window=16)
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0, 3.0, 2.0, 5.0] * 2,
    "original_max_position_embeddings": BOUND,
}

pytestmark = pytest.mark.oldest


def phi(name: str = "phi3") -> PreTrainedModel:
    rope = ROPE if name == "phi3" else {**ROPE, "short_mscale": 1.0, "long_mscale": 1.2}
    return tiny_model(name, original_max_position_embeddings=BOUND, rope_parameters=rope)


def prompt(tokens: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def generate(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


@pytest.mark.parametrize("tokens", [90, BOUND - 5, BOUND - 1, BOUND, BOUND + 1])
@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_the_cache_holds_a_text_that_grows_past_the_original_length(name: str, tokens: int) -> None:
    model, ids = phi(name), prompt(tokens, rows=2)
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, ids, **passing(cache))
    assert torch.equal(text, generate(model, ids, use_cache=False))
    assert cache.get_seq_length() == tokens + NEW - 1
    cache.check_integrity()
    assert cache.dequantize(0)[2].all()


def test_a_long_prompt_as_with_a_dynamic_cache() -> None:
    model, ids = phi(), prompt(90)
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, ids, **passing(cache))
    assert torch.equal(text, generate(model, ids, **passing(DynamicCache(config=model.config))))
    assert cache.get_seq_length() == 90 + NEW - 1


def test_a_name_and_a_budget_hold_beyond_the_original_length() -> None:
    model, ids = phi(), prompt(300)
    options = {"cache_implementation": "diffkv", "cache_config": {"max_bytes": 120_000}}
    cache = generate(model, ids, **options, return_dict_in_generate=True)
    cache = passed(cache)
    assert isinstance(cache, DiffKVCache) and cache.get_seq_length() == 300 + NEW - 1
    assert 0 < cache.memory().bytes <= 120_000


def test_a_second_turn_past_the_original_length() -> None:
    model, ids = phi(), prompt(30)
    cache = DiffKVCache(model.config, LOSSLESS)
    first = generate(model, ids, **passing(cache))
    whole = torch.cat([first, prompt(40)], dim=1)
    second = generate(model, whole, **passing(cache))
    assert torch.equal(second, generate(model, whole, use_cache=False))
    assert cache.get_seq_length() == whole.shape[1] + NEW - 1


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 16}], ids=str)
def test_other_ways_to_generate_past_the_original_length(options: dict[str, Any]) -> None:
    model, ids = phi(), prompt(BOUND - 5)
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, ids, **options, **passing(cache))
    options = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    assert torch.equal(text, generate(model, ids, **options, use_cache=False))
    assert cache.get_seq_length() == BOUND - 5 + NEW - 1
    assert cache.batch_size == options.get("num_beams", 1)


def test_tokens_can_be_taken_back_past_the_original_length() -> None:
    """Candidates are computed with the factors of the text they would form, so the text is not quite the plain one."""
    model, ids = phi(), prompt(BOUND - 5).repeat(1, 2)[:, : BOUND - 5]
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, ids, prompt_lookup_num_tokens=3, **passing(cache))
    assert text.shape[1] == BOUND - 5 + NEW
    assert cache.get_seq_length() == text.shape[1] - 1
    cache.check_integrity()


def test_a_part_of_the_text_cannot_be_computed_anew() -> None:
    model = phi()
    cache = DiffKVCache(model.config, LOSSLESS)
    first = generate(model, prompt(30), **passing(cache))
    held = cache.get_seq_length()
    new, mask = prompt(BOUND + 6), torch.ones(1, held + BOUND + 6, dtype=torch.int64)
    with pytest.raises(CacheNotUsedError, match="original_max_position_embeddings=64.*pass the whole text"):
        generate(model, new, attention_mask=mask, **passing(cache))
    assert cache.get_seq_length() == held
    whole = torch.cat([first[:, :held], new], dim=1)
    text = generate(model, whole, **passing(cache))
    assert torch.equal(text, generate(model, whole, use_cache=False))


# models that manage the cache themselves


def drop(cache: DiffKVCache) -> None:
    return None


def another(cache: DiffKVCache) -> DynamicCache:
    return DynamicCache()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", [drop, another, copy.deepcopy], ids=lambda change: change.__name__)
def test_a_model_that_changes_the_cache_in_a_step(change: Callable, late: bool, monkeypatch: Any) -> None:
    """The change comes before or after the code common to all models has made a forward's arguments."""
    model, ids = tiny_model("llama"), prompt(20)
    original = type(model).prepare_inputs_for_generation

    def prepare(self: Any, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        if input_ids.shape[1] < 24:
            return original(self, input_ids, **kwargs)
        if not late:
            kwargs |= passing(change(passed(kwargs)))
        inputs = original(self, input_ids, **kwargs)
        if late:
            inputs |= passing(change(passed(inputs)))
        return inputs

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    cache = DiffKVCache(model.config, LOSSLESS)
    with pytest.raises(CacheNotUsedError, match="LlamaForCausalLM.*cannot use DiffKVCache"):
        generate(model, ids, **passing(cache))
    assert cache.get_seq_length() == 23


def test_a_model_that_never_uses_the_cache(monkeypatch: Any) -> None:
    """The model nevertheless says that it did."""
    model = tiny_model("llama")
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = passed(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        outputs = original(self, *args, **{**kwargs, "use_cache": False})
        outputs[next(iter(passing(None)))] = cache
        return outputs

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(CacheNotUsedError, match="without passing their keys and values"):
        generate(model, prompt(20), use_cache=True, **passing(DiffKVCache(model.config, LOSSLESS)))


def test_a_function_of_the_users_may_choose() -> None:
    """A function that replaces `generate()` may use any cache."""

    def uncached(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for _ in range(3):
            inputs = model.prepare_inputs_for_generation(input_ids, use_cache=False)
            logits = model(**inputs).logits[:, -1]
            input_ids = torch.cat([input_ids, logits.argmax(-1)[:, None]], dim=1)
        return input_ids

    model, ids = tiny_model("llama"), prompt(20)
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, ids, custom_generate=uncached, **passing(cache))
    assert torch.equal(text, generate(model, ids, max_new_tokens=3))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("given", [False, True])
def test_nothing_deprecated_is_asked_for(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers warns once per process about deprecated names; every such warning is counted here."""
    warned: list[str] = []
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]:
        logger = vars(module).get("logger")
        if hasattr(logger, "warning_once"):
            monkeypatch.setattr(logger, "warning_once", lambda text, *args: warned.append(text))
    model = tiny_model("llama")
    options = passing(DiffKVCache(model.config, LOSSLESS)) if given else {"cache_implementation": "diffkv"}
    generate(model, prompt(20), **options)
    assert not [text for text in warned if "deprecated" in text]
