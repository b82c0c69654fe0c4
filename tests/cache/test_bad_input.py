"""Invalid configurations, models and calls: an error that names the argument and the remedy, and nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import policy_simulation  # noqa: F401  makes "first_tokens" known
import pytest
import torch
from tiny_models import LATENT, ragged_prompts, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, T5Config, T5ForConditionalGeneration

from hf_diffkv import DiffKVCache, DiffKVConfig, HandOverError, UnsupportedModelError
from hf_diffkv.cache import supported_models
from hf_diffkv.compat import passing
from hf_diffkv.precision import SUPPORTED_BITS

LENGTHS = (20, 7)
# steps until a decode error must have surfaced: the host reads the device every 8 steps
STEPS_TO_A_LOOK = 10


@contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> Any:
    """Expects an error of `kind` whose message contains every one of `words`."""
    with pytest.raises(kind) as caught:
        yield caught
    missing = [word for word in words if not re.search(re.escape(word), str(caught.value), re.IGNORECASE)]
    assert not missing, f"{missing} not in {caught.value}"


def generate(model: PreTrainedModel, **options: Any) -> Tensor:
    ids, mask = ragged_prompts(LENGTHS)
    return model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, **options)


def contents(cache: DiffKVCache) -> dict[str, Any]:
    """Everything that can be observed of a cache."""
    filled = [i for i in cache.compressed_layers() if cache.layers[i].is_initialized]
    return {
        "seen": [layer.get_seq_length() for layer in cache.layers],
        "memory": cache.memory(),
        "levels": [cache.levels(i).tolist() for i in filled],
        "tokens": [[t.tolist() for t in cache.dequantize(i)] for i in filled],
        "significance": [cache.significance(i).tolist() for i in filled if cache.config.selects],
    }


# configurations


@pytest.mark.parametrize(
    "build",
    [
        lambda config: DiffKVConfig.from_dict({"alpha_hgih": 1.0}),
        lambda config: DiffKVConfig.from_json('{"alpha_hgih": 1.0}'),
        lambda config: DiffKVCache(config, alpha_hgih=1.0),
    ],
    ids=["from_dict", "from_json", "DiffKVCache"],
)
def test_unknown_config_key(build: Callable) -> None:
    with raises(ValueError, "alpha_hgih", "known keys", "alpha_high"):
        build(tiny_model("llama").config)


BAD_FIELDS = [
    ({"alpha_hgih": 1.0}, ("alpha_hgih", "known keys", "alpha_high")),
    ({"alpha_low": 2.0, "alpha_high": 1.0}, ("alpha_low=2", "alpha_high=1", "alpha_low <= alpha_high")),
    ({"alpha_low": (0.1, 2.0), "alpha_high": 1.0}, ("alpha_low=2", "alpha_high=1", "alpha_low <= alpha_high")),
    ({"alpha_low": -0.1}, ("alpha_low=-0.1", "at least 0")),
    ({"alpha_high": float("nan")}, ("alpha_high=nan", "number")),
    ({"window": -1}, ("window=-1", "at least 1")),
    ({"window": 0}, ("window=0", "at least 1")),
    ({"window": 2.5}, ("window=2.5", "integer")),
    ({"compaction_interval": 4}, ("compaction_interval was removed", "every step compacts")),
    ({"observation_window": 0}, ("observation_window=0", "at least 1")),
    ({"max_bytes": -5}, ("max_bytes=-5", "at least 1")),
    ({"high": (12, 4)}, ("k_bits=12", str(SUPPORTED_BITS))),
    ({"low": (4, 9)}, ("v_bits=9", str(SUPPORTED_BITS))),
    ({"high": {"k_bits": 8, "vbits": 4}}, ("vbits", "high", "v_bits")),
    ({"high": (8.0, 4)}, ("k_bits=8.0", str(SUPPORTED_BITS))),
    ({"high": {"k_bits": 8}}, ("high", "both k_bits and v_bits")),
    ({"low": "int4"}, ("low='int4'", "write it as 'K8V4'")),
    ({"policy": "nothing"}, ("policy='nothing'", "diffkv")),
    ({"policy": "lenakv"}, ("policy='lenakv'", "did you mean 'leankv'")),
    ({"policy": 3}, ("policy=3", "name")),
    ({"policy_options": {"budget": 0.5}}, ("policy_options", "'diffkv' has no option 'budget'")),
    ({"policy_options": [0.5]}, ("policy_options=[0.5]", "dictionary")),
    ({"policy": "leankv", "policy_options": {"hihg_cut": 1}}, ("'hihg_cut'", "did you mean 'high_cut'", "low_cut")),
    ({"policy": "leankv", "policy_options": {"high_cut": 1.5}}, ("high_cut=1.5", "between 0 and 1")),
    ({"policy": "first_tokens", "policy_options": {"first": 2.5}}, ("first=2.5", "an integer of at least 0")),
    ({"policy": "leankv", "policy_options": {"high_cut": 0.1, "low_cut": 0.2}}, ("low_cut=0.2", "high_cut=0.1")),
    ({"protected_layers": 1}, ("protected_layers was removed", "alpha_high and alpha_low")),
    ({"high": (8, 4, 0)}, ("k_groups=0", "at least 1")),
    ({"high": (4, 2), "low": (8, 4)}, ("low=K8V4", "high=K4V2", "swap")),
    ({"alpha_high": (1.0, 1.0, 1.0)}, ("alpha_high", "3 entries", "2 layers")),
    ({"alpha_low": (0.0,)}, ("alpha_low", "1 entries", "2 layers")),
    ({"head_precisions": [["K4V3", "K3V3"]]}, ("head_precisions", "1 entries", "2 layers", "None or 2")),
    ({"head_precisions": "K4V3"}, ("head_precisions='K4V3'", "an entry for each compressed layer")),
    ({"head_precisions": []}, ("head_precisions=[]", "an entry for each compressed layer")),
    ({"head_precisions": ["K4V3", None]}, ("head_precisions[0]='K4V3'", "each KV head")),
    ({"head_precisions": [None, ["K4V9"]]}, ("head_precisions[1]='K4V9'", "v_bits=9")),
    (
        {"head_precisions": [None, ["K4V3", None]]},
        (
            "head_precisions[1]",
            "thresholds within one layer is no longer supported",
            "every head",
            "alpha_high and alpha_low",
        ),
    ),
    ({"head_precisions": [["K4V3", "K3V3", "K3V2"]] * 2}, ("head_precisions[0]", "3 precisions", "can have two")),
    ({"head_precisions": [["K4V3"] * 2] * 2, "policy": "leankv"}, ("head_precisions", "policy='leankv'", "leave one")),
]


@pytest.mark.parametrize("fields, words", BAD_FIELDS, ids=[str(fields) for fields, _ in BAD_FIELDS])
def test_bad_config_fields(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    """Refused before anything runs, by the cache and by generate(), which leaves the model unchanged."""
    model = tiny_model("llama")
    with raises(ValueError, *words):
        DiffKVCache(model.config, **fields)
    with raises(ValueError, *words):
        generate(model, cache_implementation="diffkv", cache_config=fields)
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_config_of_another_type_names_it() -> None:
    with raises(ValueError, "cache_config=5", "a preset's name"):
        generate(tiny_model("llama"), cache_implementation="diffkv", cache_config=5)
    with raises(ValueError, "no preset 'lossless'", "choose one of 'quality'"):
        generate(tiny_model("llama"), cache_implementation="diffkv", cache_config="lossless")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"high": (8, 4, 3, 1)}, ("high.k_groups=3", "head_dim=16")),
        ({"low": (4, 2, 1, 5)}, ("low.v_groups=5", "head_dim=16")),
        ({"alpha_high": ((1.0, 1.0, 1.0),) * 2}, ("alpha_high", "3 entries", "2 KV heads")),
        ({"head_precisions": [["K4V3"] * 3] * 2}, ("head_precisions[0]", "3 entries", "2 KV heads")),
        ({"max_bytes": 1000}, ("max_bytes=1000", "window")),
        ({"page_bytes": 64, "high": "K16V16"}, ("page_bytes=64", "raise page_bytes")),
    ],
    ids=["k_groups", "v_groups", "heads", "precisions", "max_bytes", "page_bytes"],
)
def test_what_only_the_first_keys_can_tell(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config, **fields)
    before = contents(cache)
    with raises((ValueError, MemoryError), *words):
        generate(model, **passing(cache))
    assert contents(cache) == before


# models


def tiny_t5() -> PreTrainedModel:
    sizes = {"vocab_size": 128, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


@pytest.mark.parametrize(
    "build, words",
    [
        (tiny_t5, ("decoder-only", "encoder-decoder")),
        (lambda: tiny_model("deepseek_v32", **LATENT), ("choose", "DynamicCache")),
    ],
    ids=["t5", "deepseek_v32"],
)
def test_models_with_other_caches(build: Callable, words: tuple[str, ...]) -> None:
    model = build()
    attention = model.config._attn_implementation
    with raises(UnsupportedModelError, *words):
        DiffKVCache(model.config)
    with raises(UnsupportedModelError, *words):
        generate(model, cache_implementation="diffkv")
    assert model.config._attn_implementation == attention


def test_a_model_whose_attention_cannot_be_switched() -> None:
    model = tiny_model("bloom", "eager")
    before = generate(model)
    for options in ({"cache_implementation": "diffkv"}, passing(DiffKVCache(model.config))):
        with raises(UnsupportedModelError, "Bloom", "attention", "another cache"):
            generate(model, **options)
    with raises(UnsupportedModelError, "Bloom", "attention", "another cache"):
        DiffKVCache(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(generate(model), before)


@pytest.mark.parametrize("name", ["diffllama", "jetmoe"])
def test_models_that_change_keys_or_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are not listed as refused are detected by the first forward."""
    monkeypatch.setattr(supported_models, "REFUSED_TYPES", {})
    model = tiny_model(name, "eager")
    with raises(HandOverError, "keys or values", "cannot use DiffKVCache"):
        generate(model, cache_implementation="diffkv")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_was_not_switched(attention: str) -> None:
    """The first forward stops, and the cache works after the remedies named in the message."""
    model = tiny_model("llama", attention)
    cache = DiffKVCache(model.config, window=4)
    ids, mask = ragged_prompts(LENGTHS)
    words = ("layer 0", 'set_attn_implementation("diffkv")', "reset()")
    for _ in range(2):
        with raises(HandOverError, *words):
            model(ids, attention_mask=mask, **passing(cache))
    with raises(HandOverError, *words):
        generate(model, **passing(cache))
    cache.reset()
    model.set_attn_implementation("diffkv")
    fresh = DiffKVCache(model.config, window=4)
    outputs = [model(ids, attention_mask=mask, **passing(c)).logits for c in (cache, fresh)]
    assert torch.equal(*outputs)
    assert contents(cache) == contents(fresh)


# keys and values


@contextmanager
def spoiled(module: nn.Module, value: float) -> Any:
    """Puts `value` into the module's output for the last token of the first row."""

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, -1, 0] = value
        return output

    handle = module.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def visible(cache: DiffKVCache, new: int) -> Tensor:
    """The mask of a forward of `new` tokens after the padded prompt of `filled`, or of a first one."""
    seen = cache.get_seq_length()
    prompt = ragged_prompts(LENGTHS)[1] if seen else torch.ones(2, 0, dtype=torch.int64)
    return torch.cat([prompt, torch.ones(2, seen + new - prompt.shape[1], dtype=torch.int64)], 1)


def filled(model: PreTrainedModel) -> DiffKVCache:
    """A cache after a prompt and one decode step."""
    cache = DiffKVCache(model.config, alpha_high=1.0, alpha_low=0.5, window=4)
    ids, mask = ragged_prompts(LENGTHS)
    model(ids, attention_mask=mask, **passing(cache))
    model(ids[:, -1:], attention_mask=visible(cache, 1), **passing(cache))
    return cache


def follow_up(model: PreTrainedModel, cache: DiffKVCache) -> Tensor:
    ids = ragged_prompts((5, 5), seed=2)[0]
    return model(ids, attention_mask=visible(cache, 5), **passing(cache)).logits


def assert_unharmed_or_refusing(model: PreTrainedModel, cache: DiffKVCache) -> None:
    """A cache that was `filled` continues as if no call had failed, or says that it must be reset."""
    try:
        logits = follow_up(model, cache)
    except (HandOverError, ValueError) as error:
        assert "reset()" in str(error)
        cache.reset()
        assert contents(cache) == contents(DiffKVCache(model.config, cache.config))
    else:
        assert torch.equal(logits, follow_up(model, filled(model)))


NOT_STORABLE = [float("nan"), float("inf"), 1e6]


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
@pytest.mark.parametrize("value", NOT_STORABLE)
@pytest.mark.sampled(6)
def test_keys_or_values_of_a_prompt_that_cannot_be_stored(part: str, value: float) -> None:
    model = tiny_model("llama", "diffkv")
    attention = model.model.layers[0].self_attn
    empty = DiffKVCache(model.config)
    with spoiled(getattr(attention, part), value), raises(ValueError, "keys or values", "NaN", "bfloat16"):
        follow_up(model, empty)
    assert sum(empty.memory().tokens.values()) == 0
    assert empty.get_seq_length() == 0
    assert torch.equal(follow_up(model, empty), follow_up(model, DiffKVCache(model.config)))

    cache, twin = filled(model), filled(model)
    before = contents(cache)
    with spoiled(getattr(attention, part), value), raises(ValueError, "keys or values", "NaN", "bfloat16"):
        follow_up(model, cache)
    assert contents(cache) == before
    cache.check_integrity()
    assert torch.equal(follow_up(model, cache), follow_up(model, twin))


def test_a_later_layer_that_cannot_be_stored_does_not_go_unnoticed() -> None:
    """Earlier layers already hold the prompt when the error is found."""
    model = tiny_model("llama", "diffkv")
    cache = filled(model)
    with spoiled(model.model.layers[1].self_attn.v_proj, float("nan")), raises(ValueError, "keys or values", "NaN"):
        follow_up(model, cache)
    assert_unharmed_or_refusing(model, cache)


@pytest.mark.parametrize("layer_idx", [0, 1])
@pytest.mark.parametrize("value", NOT_STORABLE)
def test_keys_of_a_decode_step_that_cannot_be_stored(layer_idx: int, value: float) -> None:
    """It is noticed when the host next reads the device, and remains an error until the cache is reset."""
    model = tiny_model("llama", "diffkv")
    token = torch.full((2, 1), 5)
    cache = filled(model)
    with spoiled(model.model.layers[layer_idx].self_attn.k_proj, value):
        model(token, attention_mask=visible(cache, 1), **passing(cache))
    with raises(ValueError, "keys or values", "NaN", "bfloat16"):
        cache.check_integrity()
    with raises(ValueError, "keys or values", "NaN", "bfloat16"):
        for _ in range(STEPS_TO_A_LOOK):
            model(token, attention_mask=visible(cache, 1), **passing(cache))
    with raises(ValueError, "keys or values"):
        model(token, attention_mask=visible(cache, 1), **passing(cache))
    cache.reset()
    assert torch.equal(follow_up(model, cache), follow_up(model, DiffKVCache(model.config, cache.config)))


@pytest.mark.parametrize("value", NOT_STORABLE)
def test_padding_of_a_prompt_may_hold_anything(value: float) -> None:
    model = tiny_model("llama", "diffkv")
    ids, mask = ragged_prompts(LENGTHS)
    mask[0, -1] = 0  # the token that `spoiled` touches
    caches = [DiffKVCache(model.config, window=4) for _ in range(2)]
    with spoiled(model.model.layers[0].self_attn.v_proj, value):
        model(ids, attention_mask=mask, **passing(caches[0]))
    model(ids, attention_mask=mask, **passing(caches[1]))
    assert contents(caches[0]) == contents(caches[1])


@pytest.mark.parametrize("value", NOT_STORABLE)
def test_padding_of_a_decode_step_may_hold_anything(value: float) -> None:
    model = tiny_model("llama", "diffkv")
    caches = [filled(model) for _ in range(2)]
    mask = torch.cat([ragged_prompts(LENGTHS)[1], torch.tensor([[1, 0], [1, 1]])], 1)
    token = torch.full((2, 1), 5)
    with spoiled(model.model.layers[0].self_attn.k_proj, value):
        model(token, attention_mask=mask, **passing(caches[0]))
    model(token, attention_mask=mask, **passing(caches[1]))
    for cache in caches:
        cache.check_integrity()
    assert contents(caches[0]) == contents(caches[1])


# calls


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_another_batch_size(name: str) -> None:
    """This also holds if a layer of Transformers' own, which would fail halfway, comes first."""
    model = tiny_model(name, "diffkv")
    cache, twin = filled(model), filled(model)
    before = contents(cache)
    ids = ragged_prompts((5, 5, 5))[0]
    for call in (lambda: model(ids, **passing(cache)), lambda: model(ids[:1, :1], **passing(cache))):
        with raises(ValueError, "2 sequences", "new DiffKVCache", "batch_repeat_interleave"):
            call()
    assert contents(cache) == before
    assert torch.equal(follow_up(model, cache), follow_up(model, twin))


def test_another_batch_size_where_states_come_first() -> None:
    model = tiny_model("lfm2", "diffkv", layer_types=["conv", "full_attention"])
    cache, twin = filled(model), filled(model)
    for batch in (1, 3):
        with raises(ValueError, f"2 sequences but the model was called with {batch}", "batch_repeat_interleave"):
            model(ragged_prompts((5,) * batch)[0], **passing(cache))
        cache.check_integrity()
    assert torch.equal(follow_up(model, cache), follow_up(model, twin))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_another_dtype(name: str) -> None:
    model = tiny_model(name, "diffkv")
    cache, twin = filled(model), filled(model)
    before = contents(cache)
    with raises(ValueError, "float32", "bfloat16", "new DiffKVCache"):
        follow_up(tiny_model(name, "diffkv", dtype=torch.bfloat16), cache)
    assert contents(cache) == before
    assert torch.equal(follow_up(model, cache), follow_up(model, twin))


def test_iteration() -> None:
    cache = filled(tiny_model("llama", "diffkv"))
    with raises(TypeError, "cannot be iterated", "dequantize", "DataParallel"):
        list(cache)


def test_layers_that_are_not_compressed_or_empty() -> None:
    model = tiny_model("gemma2", "diffkv")
    cache = DiffKVCache(model.config)
    for read in (cache.levels, cache.dequantize, cache.significance):
        with raises(ValueError, "layer 1", "holds nothing yet"):
            read(1)
        with raises(ValueError, "layer 0", "DynamicSlidingWindowLayer", "[1]"):
            read(0)


@pytest.mark.parametrize("argument", ["position_bias", "indices", "block_indices", "sinks"])
def test_attention_arguments_that_cannot_be_honoured(argument: str) -> None:
    model = tiny_model("llama", "diffkv")
    ids = ragged_prompts((9, 9))[0]
    cache = filled(model)
    for used in (cache, DynamicCache(config=model.config)):
        with raises(HandOverError, argument, "LlamaAttention", "another cache", "eager"):
            mask = visible(used, 9)
            model(ids, attention_mask=mask, **passing(used), **{argument: torch.zeros(2, 1)})
    assert_unharmed_or_refusing(model, cache)


def test_bidirectional_attention() -> None:
    model = tiny_model("llama", "diffkv")
    cache = filled(model)
    with raises(HandOverError, "both directions", "cannot use DiffKVCache"):
        ids = ragged_prompts((9, 9))[0]
        model(ids, attention_mask=visible(cache, 9), **passing(cache), is_causal=False)
    assert_unharmed_or_refusing(model, cache)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with raises(HandOverError, "both directions", "cannot use DiffKVCache"):
        model(ids, **passing(DiffKVCache(model.config)))


def test_masks_that_cannot_be_honoured() -> None:
    model = tiny_model("llama", "diffkv")
    ids = ragged_prompts((5, 5), seed=2)[0]
    past = max(LENGTHS) + 1
    padding = torch.cat([ragged_prompts(LENGTHS)[1].bool(), torch.ones(2, 1, dtype=torch.bool)], 1)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].expand(2, 1, 5, 5)
    allowed = torch.cat([padding[:, None, None].expand(2, 1, 5, past), causal], -1)
    expected = model(ids, attention_mask=allowed, **passing(filled(model))).logits
    assert expected.isfinite().all()

    hidden = allowed.clone()
    hidden[0, 0, 2, 3] = False
    bias = torch.where(allowed, 0.5, torch.finfo(torch.float32).min)
    end = allowed.clone()
    end[0, 0, -1, past + 1] = False
    packed = allowed.clone()
    packed[1, 0, 3:, past : past + 3] = False
    for mask, words in (
        (hidden, ("hides some past tokens", "to none")),
        (causal, ("mask covers 5 keys", "seen 26", "past ones included")),
        (bias, ("bias", "allow or forbid")),
        (allowed.long(), ("torch.int64", "mask.bool()")),
        (end, ("hides new tokens from the last", "not padding")),
        (packed, ("hides new tokens from the last", "rows of a batch")),
    ):
        cache = filled(model)
        with raises(HandOverError, *words):
            model(ids, attention_mask=mask, **passing(cache))
        assert_unharmed_or_refusing(model, cache)


@pytest.mark.parametrize("rows", ["see nothing", "see themselves", "see all"])
def test_masks_with_rows_of_padding(rows: str) -> None:
    model = tiny_model("llama", "diffkv")
    ids, padding = ragged_prompts((9, 5))
    mask = (torch.ones(9, 9, dtype=torch.bool).tril() & padding.bool()[:, None])[:, None]
    if rows != "see nothing":
        shown = torch.eye(9, dtype=torch.bool) if rows == "see themselves" else torch.ones(9, 9, dtype=torch.bool)
        mask = torch.where(padding.bool()[:, None, :, None], mask, shown)
    cache, expected = DiffKVCache(model.config), DiffKVCache(model.config)
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, **passing(cache)).logits
    plain = model(ids, attention_mask=padding, position_ids=positions, **passing(expected)).logits
    torch.testing.assert_close(logits[padding.bool()], plain[padding.bool()])
    assert (cache.levels(0) == expected.levels(0)).all()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("new", [1, 5])
def test_masks_of_the_new_tokens_alone_are_refused_before_anything_changes(family: str, new: int) -> None:
    model = tiny_model(family, "diffkv")
    ids = ragged_prompts((new, new), seed=2)[0]
    padded = torch.ones(2, new, dtype=torch.int64)
    padded[1, : new - 1] = 0
    for mask in (torch.ones(2, new, dtype=torch.int64), padded):
        cache = filled(model)
        before = contents(cache)
        seen = max(LENGTHS) + 1 + new
        with raises(HandOverError, f"mask covers {new} keys", f"seen {seen}", "past ones included"):
            model(ids, attention_mask=mask, **passing(cache))
        assert contents(cache) == before
