"""Models in every dtype, under autocast, and with quantised weights: the cache follows attention's dtype."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_equal_contents
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedModel,
    QuantoConfig,
)

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.compat import passing

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY_LM = EXAMPLES / "models" / "tiny-lm"
TEXT = (EXAMPLES / "prompts" / "recall.txt").read_text()
# tiny-lm is confident about these answers, so that the rounding of a narrow dtype cannot change them
QUESTIONS = {TEXT[:560] + "?oak=": "5305\n", TEXT[:500] + "?red=": "3160\n", TEXT[:560] + "?sky=": "0400\n"}
COMPRESSED = {"alpha_high": 1.0, "alpha_low": 0.0, "window": 16}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def answers(model: PreTrainedModel, cache: Any) -> list[str]:
    """Returns the model's answers to the questions, in one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    inputs = tokenizer(list(QUESTIONS), return_tensors="pt", padding=True)
    output = model.generate(**inputs, **passing(cache), max_new_tokens=5, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :])


def continuation(model: PreTrainedModel, cache: Any) -> Tensor:
    """24 greedy tokens per row."""
    ids, mask = ragged_prompts((90, 31))
    return model.generate(
        ids, attention_mask=mask, **passing(cache), max_new_tokens=24, do_sample=False, eos_token_id=None
    )


def check_compressed(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Checks that a compressed cache answers, holds the window in `dtype`, and is smaller than a dense one."""
    cache = DiffKVCache(model.config, DiffKVConfig(**COMPRESSED))
    assert answers(model, cache) == list(QUESTIONS.values())
    cache.check_integrity()
    report, config = cache.memory(), model.config
    element = torch.empty((), dtype=dtype).element_size()
    tokens = sum(map(len, QUESTIONS)) + len(QUESTIONS) * 4
    assert report.dense_bytes == tokens * config.num_hidden_layers * config.num_key_value_heads * 128 * element
    assert report.bytes < report.dense_bytes
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == dtype


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled(100)
def test_dtypes(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=dtype)
    exact = answers(model, DynamicCache(config=model.config))
    assert exact == list(QUESTIONS.values())
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    assert answers(model, cache) == exact
    keys = cache.dequantize(0)[0]
    assert torch.equal(keys, keys.to(dtype).to(keys.dtype)) and cache.layers[0].keys.dtype == dtype
    check_compressed(model, dtype)
    if dtype in (torch.float32, torch.float64):
        expected = continuation(model, DynamicCache(config=model.config))
        assert torch.equal(continuation(model, DiffKVCache(model.config, DiffKVConfig.lossless())), expected)


def test_a_cache_keeps_its_dtype() -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config)
    held = continuation(model, cache)
    _, mask = ragged_prompts((held.shape[1], held.shape[1] - 90 + 31))
    with pytest.raises(ValueError, match="torch.float32.*torch.bfloat16.*use a new DiffKVCache"):
        model.to(torch.bfloat16).generate(held, attention_mask=mask, **passing(cache), max_new_tokens=1)


# autocast


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sampled(100)
def test_autocast_stores_what_attention_gets(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        assert answers(model, DynamicCache(config=model.config)) == list(QUESTIONS.values())
        cache = DiffKVCache(model.config, DiffKVConfig.lossless())
        assert answers(model, cache) == list(QUESTIONS.values())
        assert cache.layers[0].keys.dtype == dtype
        check_compressed(model, dtype)


class Replay:
    """The layers' calls in one run, and the same calls on another cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, Tensor, Tensor, Tensor, tuple, Tensor]] = []
        attend = DiffKVLayer.attend

        def spy(layer: DiffKVLayer, query: Tensor, *options: Any) -> Tensor:
            key, value = layer.pending
            output = attend(layer, query, *options)
            self.calls.append((layer.index, query, key, value, options, output))
            return output

        monkeypatch.setattr(DiffKVLayer, "attend", spy)
        self.attend = attend

    def on(self, cache: DiffKVCache) -> None:
        """Feeds `cache` the same tensors and compares what attention returns."""
        for index, query, key, value, options, output in self.calls:
            cache.update(key, value, index)
            again = self.attend(cache.layers[index], query.to(key.dtype), *options)
            assert torch.equal(again.to(output.dtype), output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.sampled(6)
def test_autocast_changes_nothing_inside(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, levels, values and sums equal those of the same keys and values without autocast."""
    model = tiny_model("llama")
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.4, window=16)
    cache, replay = DiffKVCache(model.config, config), Replay(monkeypatch)
    ids, _ = ragged_prompts((90,))
    with torch.autocast("cpu", dtype=dtype):
        model.generate(ids, **passing(cache), max_new_tokens=40, do_sample=False, **options)
        held = cache.memory()
        cache.check_integrity()
    assert min(held.tokens.values()) > 10 and cache.layers[0].keys.dtype == dtype
    assert cache.memory() == held
    if options:
        return  # rows are reordered and tokens taken back between the calls
    again = DiffKVCache(model.config, config)
    replay.on(again)
    assert_equal_contents(again, cache)


# quantised weights

METHODS: dict[str, Callable[[torch.dtype], Any]] = {
    "bitsandbytes 8 bit": lambda dtype: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes 4 bit": lambda dtype: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype),
    "quanto 8 bit": lambda dtype: QuantoConfig(weights="int8"),
    "quanto 4 bit": lambda dtype: QuantoConfig(weights="int4"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(100)
def test_quantised_weights(method: str, dtype: torch.dtype) -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, quantization_config=METHODS[method](dtype), dtype=dtype)
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    exact = answers(model, DynamicCache(config=model.config))
    assert exact == list(QUESTIONS.values())
    assert answers(model, DiffKVCache(model.config, DiffKVConfig.lossless())) == exact
    check_compressed(model, dtype)
    # 8-bit bitsandbytes also rounds activations, which amplifies a difference in the last digit
    if dtype == torch.float32 and method != "bitsandbytes 8 bit":
        expected = continuation(model, DynamicCache(config=model.config))
        assert torch.equal(continuation(model, DiffKVCache(model.config, DiffKVConfig.lossless())), expected)
