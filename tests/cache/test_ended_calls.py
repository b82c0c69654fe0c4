"""Leftovers of forwards and calls that ended with an error, ended in another mode, or needed a recording."""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny_models import tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.errors import HandOverError
from hf_diffkv.compat import passing

LOSSLESS = DiffKVConfig.lossless()
KINDS = ["conv", "full_attention", "conv", "full_attention", "conv"]
STATES = pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="models of this release take states unseen")


@functools.cache
def hybrid() -> PreTrainedModel:
    """A model with convolutions before, between and after two compressed layers."""
    return tiny_model("lfm2", num_hidden_layers=len(KINDS), layer_types=KINDS)


def ids(count: int, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (batch, count), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, given: Tensor, cache: Any, new: int = 6, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(given), "do_sample": False, **passing(cache), **options}
    return model.generate(given, max_new_tokens=new, min_new_tokens=new, **options)


class Failing(StoppingCriteria):
    """Fails after some tokens."""

    def __init__(self, after: int = 4) -> None:
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("stopped here")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@STATES
@pytest.mark.parametrize("place", range(len(KINDS)))
def test_a_hybrid_interrupted_in_any_layer_is_never_wrong(place: int) -> None:
    model, cache, expected = hybrid(), DiffKVCache(hybrid(), LOSSLESS), DynamicCache(config=hybrid().config)
    text = torch.cat([generate(model, ids(40), cache), ids(5, seed=7)], 1)
    generate(model, ids(40), expected)
    seen = cache.get_seq_length()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[place].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, text, cache)
    hook.remove()
    if place == len(KINDS) - 1:
        # all layers hold the tokens
        assert cache.get_seq_length() == text.shape[1]
        longer = torch.cat([text, ids(3, seed=8)], 1)
        assert torch.equal(generate(model, longer, cache), generate(model, longer, expected))
        return
    for use in (lambda: generate(model, text, cache), lambda: cache.fork(1), lambda: cache.save_pretrained("nowhere")):
        with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
            use()
    assert cache.get_seq_length() in (seen, text.shape[1])
    cache.reset()
    assert torch.equal(generate(model, text, cache), generate(model, text, expected))


@STATES
@pytest.mark.parametrize("count", [1, 5], ids=["step", "turn"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_a_hybrids_own_forward_that_failed_behind_its_first_states(name: str, count: int) -> None:
    """The next forward begins in the same layer in which this one ended."""
    model = tiny_model(name, "diffkv", **FAMILIES[name].options)
    cache = DiffKVCache(model.config, LOSSLESS)
    model(ids(40), **passing(cache))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    hook = model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(ids(count, seed=7), **passing(cache))
    hook.remove()
    with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
        model(ids(count, seed=7), **passing(cache))
    cache.reset()
    for given in (ids(40), ids(1), ids(3)):
        model(given, **passing(cache))
    cache.check_integrity()


@STATES
@pytest.mark.parametrize("place", [0, 2])
def test_a_look_at_a_state_is_no_forward(place: int) -> None:
    model, cache, expected = hybrid(), DiffKVCache(hybrid(), LOSSLESS), DynamicCache(config=hybrid().config)
    text = generate(model, ids(40), cache)
    generate(model, ids(40), expected)
    states = [each.get_conv_state(place) for each in (cache, expected)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    assert cache.memory().tokens["window"]
    cache.get_conv_state(place)
    assert torch.equal(generate(model, text, cache), generate(model, text, expected))


@STATES
def test_a_hybrid_that_refused_tokens_says_so() -> None:
    """Its convolutions have consumed the tokens and cannot give them back."""
    model, cache = hybrid(), DiffKVCache(hybrid(), LOSSLESS)
    mask = torch.ones_like(ids(40))
    mask[0, :5] = 0
    text = generate(model, ids(40), cache, attention_mask=mask)
    with pytest.raises(ValueError, match="padding or hidden before"):
        generate(model, torch.cat([text, ids(2)], 1), cache)
    with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
        generate(model, torch.cat([text, ids(2)], 1), cache, attention_mask=torch.cat([mask, mask[:, -8:]], 1))
    assert copy.deepcopy(cache).get_seq_length() == cache.get_seq_length()
    cache.reset()
    assert torch.equal(generate(model, ids(40), cache, attention_mask=mask), text)


def test_sliding_layers_get_back_what_does_not_fit() -> None:
    model = tiny_model("gemma2", "eager")
    cache = DiffKVCache(model, high="K5V4", low="K5V4", window=8, max_bytes=60_000)
    text = ids(40)
    with pytest.raises(MemoryError, match="max_bytes=60000 is full"):
        text = generate(model, text, cache, new=2000)
    seen = {layer.get_seq_length() for layer in cache.layers}
    assert len(seen) == 1 and cache.get_seq_length() > 40
    cache.check_integrity()
    cache.batch_select_indices(torch.tensor([1]))
    whole = torch.cat([piece.ids for piece in cache.held_tokens.pieces(cache.get_seq_length())], 1)
    assert generate(model, torch.cat([whole, ids(1, batch=1)], 1), cache, new=3).shape[1] == whole.shape[1] + 4


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "config", [LOSSLESS, DiffKVConfig(high="K8V4", low="K4V2", alpha_low=0.02, window=8)], ids=["lossless", "levels"]
)
def test_what_inference_mode_filled_goes_on_outside(name: str, config: DiffKVConfig, tmp_path: Path) -> None:
    model = tiny_model(name, "eager")
    whole = DiffKVCache(model, config)
    expected = generate(model, ids(40), whole, new=63)
    cache = DiffKVCache(model, config)
    with torch.inference_mode():
        text = generate(model, ids(40), cache, new=3)
    cache.save_pretrained(tmp_path)
    with torch.inference_mode():
        loaded = DiffKVCache.from_pretrained(tmp_path, model)
    for each in (cache.fork(1)[0], copy.deepcopy(cache), loaded, cache):
        assert torch.equal(generate(model, text.clone(), each, new=60), expected)
        each.check_integrity()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0]))
    text = expected[1:]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            text = generate(model, text.clone(), cache, new=20)
    cache.check_integrity()


@pytest.mark.parametrize("name", ["gemma2", pytest.param("qwen3_next", marks=STATES)])
def test_copies_of_what_a_forward_with_gradients_filled(name: str) -> None:
    model = tiny_model(name, "diffkv", **FAMILIES[name].options)
    cache, expected = DiffKVCache(model.config, LOSSLESS), DynamicCache(config=model.config)
    with torch.enable_grad():
        model(ids(40), **passing(cache))
    with torch.no_grad():
        model(ids(40), **passing(expected))
        logits = model(ids(1), **passing(expected)).logits
        for each in (copy.deepcopy(cache), *cache.fork(2), cache):
            torch.testing.assert_close(model(ids(1), **passing(each)).logits, logits, rtol=0, atol=1e-4)


def test_a_kept_exception_keeps_no_claim() -> None:
    model, cache = tiny_model("llama"), DiffKVCache(tiny_model("llama"), LOSSLESS)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(generate, model, ids(40), cache, stopping_criteria=[Failing()])
        assert isinstance(call.exception(), RuntimeError)
    text = generate(model, ids(40), DynamicCache(config=model.config), new=5)
    assert generate(model, text, cache, new=3).shape[1] == 48
    cache.fork(1)
    # an empty cache belongs to no model
    empty = DiffKVCache(model, high="K5V4", low="K5V4", max_bytes=3000)
    kept = []
    for each in (model, tiny_model("llama", seed=2)):
        with pytest.raises(MemoryError) as caught:
            generate(each, ids(40), empty)
        kept.append(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_took_tokens_back_leaves_no_recording(fails: bool, tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model, window=8)
    options = {"prompt_lookup_num_tokens": 3}
    if fails:
        with pytest.raises(RuntimeError, match="stopped here"):
            generate(model, ids(40, 1), cache, **options, stopping_criteria=[Failing(2)])
        text = torch.cat([ids(40, 1), ids(9, 1, seed=3)], 1)[:, : cache.get_seq_length() + 1]
        cache.held_tokens.clear()
    else:
        text = generate(model, ids(40, 1), cache, **options)
    assert not cache.stores.recording and not any(store.recording for store in cache.stores.all)
    generate(model, text, cache, new=100)
    plain = DiffKVCache(model, window=8)
    generate(model, ids(cache.get_seq_length(), 1), plain, new=1)
    assert cache.memory().bytes < 1.3 * plain.memory().bytes
    cache.save_pretrained(tmp_path)
    own = DiffKVCache(model, window=8)
    own.activate_past_recording()
    generate(model, ids(40, 1), own, **options)
    assert own.stores.recording


@pytest.mark.parametrize("name", ["gemma2", pytest.param("lfm2", marks=STATES)])
def test_a_call_that_stored_nothing_leaves_no_recording(name: str) -> None:
    """Transformers' own layers have no `crop` while they are empty."""

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped here")

    model = hybrid() if name == "lfm2" else tiny_model(name, "eager")
    cache, plain = DiffKVCache(model, window=8), DiffKVCache(model, window=8)
    hook = model.model.embed_tokens.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="stopped here"):
            generate(model, ids(40, 1), cache, prompt_lookup_num_tokens=3)
    finally:
        hook.remove()
    assert torch.equal(generate(model, ids(40, 1), cache, 30), generate(model, ids(40, 1), plain, 30))
    assert cache.memory() == plain.memory() and cache.memory().tokens["high"] > 0
    cache.fork(1)


def test_generating_within_a_module() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hybrid()

        def forward(self, given: Tensor, **options: Any) -> Tensor:
            return self.inner.generate(given, max_new_tokens=6, do_sample=False, **options)

    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        given = ids(40, 1 if "prompt_lookup_num_tokens" in options else 2)
        named = {"cache_implementation": "diffkv", "cache_config": LOSSLESS}
        assert torch.equal(Outer()(given, **options, **named), Outer()(given, **options))
    cache, expected = DiffKVCache(hybrid(), LOSSLESS), DynamicCache(config=hybrid().config)
    text = ids(40)
    for _ in range(2):
        again = Outer()(text, **passing(expected))
        text = Outer()(text, **passing(cache))
        assert torch.equal(text, again)
