"""Contradictory options of `generate()` and arguments of the cache: an error, and nothing changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_input import LENGTHS, contents, generate, raises
from tiny_models import ragged_prompts, tiny_model
from transformers import DynamicCache, GenerationConfig

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import cache_argument, passing

FIELDS = {"alpha_high": 3.0, "window": 8}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"use_cache": False}, ("use_cache=False", "DiffKVCache", "leave one")),
        ({"cache_config": {"window": 9}}, ("cache_config", "'window': 9", "leave cache_config out")),
        ({"cache_config": DiffKVConfig()}, ("cache_config", "leave cache_config out")),
        ({"cache_config": {"nbits": 4}}, ("nbits", "known keys")),
        ({"cache_implementation": "static"}, ("cache_implementation", cache_argument(), "only one")),
        ({"cache_implementation": "offloaded"}, ("cache_implementation", cache_argument(), "only one")),
    ],
)
def test_options_that_contradict_a_given_cache(options: dict[str, Any], words: tuple[str, ...]) -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config, **FIELDS)
    before = contents(cache)
    with raises(ValueError, *words):
        generate(model, **passing(cache), **options)
    assert contents(cache) == before
    assert model.config._attn_implementation == "sdpa"


def test_options_that_agree_with_a_given_cache() -> None:
    model = tiny_model("llama")
    expected = generate(model, **passing(DiffKVCache(model.config, **FIELDS)))
    for config in (FIELDS, DiffKVConfig(**FIELDS), {"window": 8}):
        cache = DiffKVCache(model.config, **FIELDS)
        options = {"cache_implementation": "diffkv", "cache_config": config}
        assert torch.equal(generate(model, **passing(cache), **options), expected)
    # a setting saved with the model is a default
    model.generation_config = GenerationConfig(cache_implementation="diffkv", cache_config={"window": 9})
    assert torch.equal(generate(model, **passing(DiffKVCache(model.config, **FIELDS))), expected)


@pytest.mark.parametrize("made_from", ["model", "configuration"])
@pytest.mark.parametrize("same", ["small", {"preset": "small"}, {"config": "small"}, {"target_ratio": 0.3}], ids=str)
def test_a_choice_that_agrees_with_a_given_cache(same: Any, made_from: str) -> None:
    model = tiny_model("llama")
    source = model if made_from == "model" else model.config
    cache = DiffKVCache(source, same) if isinstance(same, str) else DiffKVCache(source, **same)
    generate(model, cache_config=same, **passing(cache))
    for other in ("quality", {"preset": "quality"}, {"config": cache.config, "window": 5}):
        with raises(ValueError, "cache_config", "leave cache_config out"):
            generate(model, cache_config=other, **passing(cache))


@pytest.mark.parametrize("by_name", [True, False])
def test_prompts_that_end_with_padding(by_name: bool) -> None:
    model = tiny_model("llama")
    ids, mask = ragged_prompts(LENGTHS)
    cache = DiffKVCache(model.config)
    options = {"cache_implementation": "diffkv"} if by_name else passing(cache)
    with raises(ValueError, "attention_mask", "rows [1]", "padding_side = 'left'"):
        model.generate(ids.flip(1), attention_mask=mask.flip(1), max_new_tokens=3, **options)
    assert cache.get_seq_length() == 0 and model.config._attn_implementation == "sdpa"


def test_padding_on_the_right_is_right_where_the_model_is_called() -> None:
    model = tiny_model("llama", "diffkv")
    ids, mask = (part.flip(1) for part in ragged_prompts(LENGTHS))
    caches = DynamicCache(config=model.config), DiffKVCache(model.config, DiffKVConfig.lossless())
    dense, lossless = (model(ids, attention_mask=mask, **passing(cache)).logits for cache in caches)
    torch.testing.assert_close(lossless[mask.bool()], dense[mask.bool()], rtol=0, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_made_for_another_model(layers: int) -> None:
    model = tiny_model("llama")
    own = tiny_model("llama", num_hidden_layers=layers)
    cache = DiffKVCache(own.config)
    with raises(ValueError, "another model", "LlamaForCausalLM", "DiffKVCache(model.config)"):
        generate(model, **passing(cache))
    with raises(ValueError, "another model"):
        generate(tiny_model("gemma2", "eager"), **passing(DiffKVCache(model.config)))
    assert cache.get_seq_length() == 0 and model.config._attn_implementation == "sdpa"
    generate(own, **passing(cache))


@pytest.mark.parametrize("wrong", [lambda model: model.forward, lambda model: "a/b", lambda model: DiffKVConfig()])
def test_what_is_no_configuration(wrong: Callable) -> None:
    with raises(ValueError, "model_config is a", "DiffKVCache(model.config)"):
        DiffKVCache(wrong(tiny_model("llama")))


@pytest.mark.parametrize(
    "ours", [{"window": 9}, DiffKVConfig(window=9), "small", {"preset": "small"}, {"target_ratio": 0.3}], ids=str
)
def test_a_configuration_that_nothing_reads(ours: Any) -> None:
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="cache_implementation='diffkv'"):
        generate(model, cache_config=ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, cache_config={})
        generate(model, cache_implementation="diffkv", cache_config=ours)


def test_layers_that_do_not_exist() -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config)
    generate(model, **passing(cache))
    for read in (cache.levels, cache.dequantize, cache.significance):
        with raises(ValueError, "layer_idx=2", "2 layers"):
            read(2)
    assert torch.equal(cache.levels(-1), cache.levels(1))


def test_saving_and_loading_with_what_is_not_the_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config)
    generate(model, **passing(cache))
    with raises(ValueError, "model's configuration", "model of this cache"):
        cache.save_pretrained(tmp_path / "folder", tiny_model("qwen3"))
    assert not (tmp_path / "folder").exists()
    cache.save_pretrained(tmp_path, model)
    for wrong in (tmp_path, "some/model"):
        with raises(ValueError, "model is a", "the model itself"):
            DiffKVCache.from_pretrained(tmp_path, wrong)
    assert DiffKVCache.from_pretrained(tmp_path, model.config).get_seq_length() == cache.get_seq_length()


def test_backward_through_a_cache_is_refused() -> None:
    """A forward whose gradients are computed but never used is allowed."""
    model = tiny_model("llama", "diffkv")
    ids = ragged_prompts((9, 9))[0]
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    for turn in (ids, ids[:, :1]):
        loss = model(turn, **passing(cache)).logits.sum()
        with raises(RuntimeError, "no gradient", "use_cache=False"):
            loss.backward()
    assert model.model.layers[1].self_attn.k_proj.weight.grad is None
    assert cache.get_seq_length() == 10


def test_the_meta_device() -> None:
    model = tiny_model("llama", "diffkv").to("meta")
    with raises(ValueError, "meta device", "from_pretrained"):
        model(torch.ones(1, 5, dtype=torch.int64, device="meta"), **passing(DiffKVCache(model.config)))


def test_attention_weights_that_nobody_has() -> None:
    model = tiny_model("llama")
    options = {"output_attentions": True, "return_dict_in_generate": True}
    with pytest.warns(UserWarning, match="no attention weights.*significance.*DiffKVConfig") as found:
        given = generate(model, cache_implementation="diffkv", **options)
    assert not any(given.attentions)
    # the setting in the warning keeps significance, and the default does not
    cache = DiffKVCache(model.config, DiffKVConfig(low="K4V2"))
    assert any('DiffKVConfig(low="K4V2")' in str(warning.message) for warning in found)
    generate(model, **passing(cache))
    assert cache.significance(0).sum() > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_that_is_not_applied(compiled: bool) -> None:
    """Models in training mode ask for dropout, also in `generate()`."""
    model = tiny_model("llama", attention_dropout=0.5).train()
    if compiled:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"attention_dropout=0.5.*model.eval\(\)"):
        given = generate(model, cache_implementation="diffkv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(generate(model.eval(), cache_implementation="diffkv"), given)


@pytest.mark.parametrize("by_name", [True, False])
def test_embeddings_in_chunks(by_name: bool) -> None:
    """Transformers slices only the ids, and fails halfway with any cache."""
    model = tiny_model("llama")
    ids, mask = ragged_prompts(LENGTHS)
    cache = DiffKVCache(model.config)
    chosen = {"cache_implementation": "diffkv"} if by_name else passing(cache)
    prompt = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    with raises(ValueError, "prefill_chunk_size=9", "inputs_embeds", "leave it out"):
        model.generate(**prompt, **chosen, prefill_chunk_size=9, max_new_tokens=3)
    assert not cache.get_seq_length()
