"""A cache belongs to one model and one `generate()` call at a time."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from tiny_models import tiny_model
from transformers import StoppingCriteria

from hf_diffkv import CacheInUseError, DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing


def test_a_second_model_is_refused_until_reset() -> None:
    first, second = tiny_model("llama"), tiny_model("llama", seed=2)
    cache = DiffKVCache(first.config)
    tokens = torch.randint(1, 64, (1, 20))
    output = first.generate(tokens, **passing(cache), max_new_tokens=3, do_sample=False)
    for used in (cache, copy.deepcopy(cache), cache.fork(1)[0]):
        before = used.memory().tokens
        with pytest.raises(CacheInUseError, match="reset"):
            second.generate(output, **passing(used), max_new_tokens=3)
        assert used.memory().tokens == before
    first.generate(output, **passing(cache), max_new_tokens=3)
    cache.reset()
    second.generate(tokens, **passing(cache), max_new_tokens=3)


def test_a_model_that_is_copied_along_goes_on() -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config)
    output = model.generate(torch.randint(1, 64, (1, 20)), **passing(cache), max_new_tokens=3, do_sample=False)
    twin, copied = copy.deepcopy((model, cache))
    written = twin.generate(output, **passing(copied), max_new_tokens=3, do_sample=False)
    assert written.equal(model.generate(output, **passing(cache), max_new_tokens=3, do_sample=False))
    with pytest.raises(CacheInUseError, match="another"):
        model.generate(written, **passing(copied), max_new_tokens=3)


@pytest.mark.parametrize("field", ["window", "sinks"])
@pytest.mark.parametrize("tokens", [10**11, 10**18])
def test_a_window_beyond_all_memory(field: str, tokens: int) -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model, DiffKVConfig(**{field: tokens}))
    with pytest.raises(MemoryError, match=f"{tokens}.* do not fit in memory; lower them"):
        model.generate(torch.randint(1, 64, (1, 20)), **passing(cache), max_new_tokens=3)


class Wait(StoppingCriteria):
    """Holds a generate() call after its first token until told to continue."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        self.reached.set()
        assert self.go_on.wait(60)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_two_calls_at_once_are_refused() -> None:
    model = tiny_model("llama")
    tokens = torch.randint(1, 64, (1, 20))
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False, **passing(DiffKVCache(model.config)))
    cache, wait, results = DiffKVCache(model.config), Wait(), []

    def run() -> None:
        results.append(
            model.generate(tokens, **passing(cache), max_new_tokens=4, do_sample=False, stopping_criteria=[wait])
        )

    thread = threading.Thread(target=run)
    thread.start()
    assert wait.reached.wait(60)
    try:
        with pytest.raises(CacheInUseError, match="another generate"):
            model.generate(tokens, **passing(cache), max_new_tokens=4)
    finally:
        wait.go_on.set()
        thread.join(60)
    assert torch.equal(results[0], expected)
    model.generate(expected, **passing(cache), max_new_tokens=2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_call_within_a_call_is_refused(name: str) -> None:
    """A streamer or stopping criterion that continues its own call's cache would change that call's text."""
    model, tokens, tried = tiny_model(name, "eager"), torch.arange(3, 23)[None], []
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [0]}
    expected = model.generate(tokens, **options, **passing(DiffKVCache(model.config)))
    cache = DiffKVCache(model.config)

    class Within(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
            if not tried:
                with pytest.raises(CacheInUseError, match="another generate"):
                    model.generate(input_ids, **options, **passing(cache))
                tried.append(model.generate(input_ids, **options, **passing(copy.deepcopy(cache))))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    assert torch.equal(model.generate(tokens, **options, **passing(cache), stopping_criteria=[Within()]), expected)
    assert torch.equal(tried[0][:, :24], expected)
    model.generate(expected, **passing(cache), max_new_tokens=2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_that_is_emptied_within_its_call(name: str) -> None:
    """The call ends, because the tokens before are lost."""
    model, tokens = tiny_model(name, "eager"), torch.arange(3, 23)[None]
    cache, options = DiffKVCache(model.config), {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [0]}

    class Emptied(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
            cache.reset()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with pytest.raises(CacheInUseError, match="was emptied"):
        model.generate(tokens, **options, **passing(cache), stopping_criteria=[Emptied()])
    expected = model.generate(tokens, **options, **passing(DiffKVCache(model.config)))
    assert torch.equal(model.generate(tokens, **options, **passing(cache)), expected)
