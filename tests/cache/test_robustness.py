"""Threads, interrupts, compiled steps, and long beam searches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from runs import CONFIG, Run, assert_close_contents, assert_equal_contents, model_of, started, tokens
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

LENGTHS = (90, 33, 1, 64)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.slow
def test_six_threads_on_one_model(name: str) -> None:
    """Six caches filled at the same time hold the same contents as when filled one after the other."""
    model = model_of(name)
    start = threading.Barrier(6)

    def talk(number: int, together: bool) -> tuple[Tensor, DiffKVCache]:
        if together:
            start.wait()
        lengths = (40 + 9 * number, 7 + number)
        cache = DiffKVCache(model.config, CONFIG)
        ids, mask = ragged_prompts(lengths, seed=number)
        options = {"max_new_tokens": 25, "do_sample": False}
        sequences = model.generate(ids, attention_mask=mask, **passing(cache), **options)
        run = Run(model, cache, 2)
        run.ids = sequences[:, :-1]
        run.mask = torch.cat([mask, torch.ones(2, 24, dtype=mask.dtype)], 1)
        run.feed(tokens(2, 9, number))
        return sequences, cache

    expected = [talk(number, False) for number in range(6)]
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=number: results.update({n: talk(n, True)}), daemon=True) for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert sorted(results) == list(range(6))
    for number, (sequences, cache) in enumerate(expected):
        assert torch.equal(results[number][0], sequences)
        assert_equal_contents(results[number][1], cache)


class Failure(Exception):
    """Raised by the tests."""


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.sampled(100)
def test_an_exception_in_a_stopping_criterion(error: type[BaseException], options: dict[str, Any]) -> None:
    model = model_of()
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    ids, mask = ragged_prompts((50, 20)[:batch])
    calls = []

    def fails(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        calls.append(input_ids)
        if len(calls) == 7:
            raise error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    cache = DiffKVCache(model.config, CONFIG)
    with pytest.raises(error):
        model.generate(
            ids,
            attention_mask=mask,
            **passing(cache),
            max_new_tokens=20,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([fails]),
            **options,
        )
    cache.check_integrity()
    # Transformers 5.17 also applies the criterion to every draft
    assert cache.get_seq_length() >= (52 if "prompt_lookup_num_tokens" in options else 56)
    if not options:  # no forward was under way, so the cache goes on
        run = Run(model, cache, batch)
        run.ids, run.mask = calls[-1][:, :-1], torch.cat([mask, torch.ones(batch, 6, dtype=mask.dtype)], 1)
        other = started(model, (50, 20))
        other.steps(calls[-1][:, 50:-1])
        assert_equal_contents(cache, other.cache)
        assert torch.equal(run.steps(tokens(batch, 5)), other.steps(tokens(batch, 5)))
    assert_can_be_reused(model, cache)


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def assert_can_be_reused(model: PreTrainedModel, cache: DiffKVCache) -> None:
    cache.reset()
    assert cache.memory().bytes == 0 and cache.get_seq_length() == 0
    again, fresh = started(model, LENGTHS, cache=cache), started(model, LENGTHS, cache.config)
    assert torch.equal(again.steps(tokens(4, 20)), fresh.steps(tokens(4, 20)))
    assert_equal_contents(again.cache, fresh.cache)


@pytest.mark.parametrize("place", ["before attention", "after attention"])
@pytest.mark.parametrize("count", [1, 5], ids=["step", "turn"])
@pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
@pytest.mark.sampled(100)
def test_an_interrupt_in_the_middle_of_a_forward(place: str, count: int, recording: bool) -> None:
    """The layers then disagree: nothing is damaged, continuing is refused, and starting over works."""
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)
    model = model_of(num_hidden_layers=4)
    run = started(model, LENGTHS, config)
    run.steps(tokens(4, 9))
    if recording:
        run.cache.activate_past_recording()

    layer = model.model.layers[2]
    hook = (
        layer.register_forward_pre_hook(interrupt)
        if place == "before attention"
        else layer.self_attn.register_forward_hook(interrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run.feed(tokens(4, count, 2))
    hook.remove()
    run.cache.check_integrity()
    with pytest.raises(Exception, match=r"reset\(\)"):
        run.feed(tokens(4, count, 2))
    run.cache.check_integrity()
    assert_can_be_reused(model, run.cache)


def test_an_interrupted_prompt() -> None:
    model = model_of("gemma2", num_hidden_layers=4, layer_types=["full_attention", "sliding_attention"] * 2)

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    cache = DiffKVCache(model.config, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        started(model, LENGTHS, cache=cache)
    hook.remove()
    cache.check_integrity()
    assert_can_be_reused(model, cache)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.slow
def test_compiled_steps_equal_eager_ones(name: str, padding: bool) -> None:
    """One graph per step, whatever the length; a graph break would raise."""
    torch._dynamo.reset()
    model = model_of(name)
    lengths = LENGTHS if padding else (64, 64)
    config = DiffKVConfig(alpha_high=1.2, alpha_low=0.8, window=16)
    eager, compiled = started(model, lengths, config), started(model, lengths, config)
    compiled.model = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(24):
        step = tokens(len(lengths), 1, seed)
        torch.testing.assert_close(compiled.feed(step), eager.feed(step), rtol=1e-9, atol=1e-9)
    assert_close_contents(compiled.cache, eager.cache)
    counts = compiled.cache.memory().tokens
    assert min(counts.values()) > 10, counts


@pytest.mark.parametrize("sample", [False, True], ids=["search", "sampling"])
@pytest.mark.slow
def test_long_beam_search_loses_no_page(sample: bool) -> None:
    """Four beams of 2,048 tokens, 500 of them generated, use the memory of four independent rows."""
    model = tiny_model("llama", "diffkv", max_position_embeddings=2048)
    ids, mask = ragged_prompts((1548,))
    cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16))
    orders: list[Tensor] = []
    reorder = cache.reorder_cache

    def checked(beam_idx: Tensor) -> None:
        reorder(beam_idx)
        orders.append(beam_idx.clone())
        pool = cache.stores.all[0].pool
        held = cache.stores.all[0].owned_pages()
        assert held.unique().numel() == held.numel() == pool.capacity - 1 - pool.free_list.free

    cache.reorder_cache = checked
    options = {"attention_mask": mask, "max_new_tokens": 501}
    torch.manual_seed(0)
    model.generate(ids, **passing(cache), num_beams=4, do_sample=sample, **options)
    cache.check_integrity()
    assert len(orders) >= 499
    assert sum(not torch.equal(order, torch.arange(4)) for order in orders) > 100

    rows = DiffKVCache(model.config, cache.config)
    model.generate(ids, **passing(rows), num_return_sequences=4, do_sample=True, **options)
    assert rows.get_seq_length() == cache.get_seq_length() == 2048
    assert cache.memory().bytes <= 1.3 * rows.memory().bytes
