"""Sampling of each request, compared with Transformers' own processors, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from batching import LOSSLESS, NEW, TIGHT, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine_names import CHILD, RequestState, children
from hf_diffkv_serving.batching.sampling import Sampling, TokenLogprobs, draw
from hf_diffkv_serving.batching.sampling import _uniform as uniform
from tiny_models import tiny_model
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

POINTS = 2_000
DRAWN = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


# more tokens than are looked at first
VOCABULARY = 3000


@pytest.mark.parametrize("size", [50, pytest.param(VOCABULARY, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(1.0, top_p=0.6),
        Sampling(0.8, top_k=20, top_p=0.9),
        Sampling(2.0, min_p=0.2),
        Sampling(3.0, top_k=30, top_p=0.8, min_p=0.05),
        Sampling(1.0, top_p=0.0),
        Sampling(1e-4),
        Sampling(9.0, top_p=0.9),
        Sampling(9.0, top_k=1500, top_p=0.99),
        Sampling(9.0, min_p=0.5),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_transformers_says(sampling: Sampling, size: int) -> None:
    scores = torch.randn(1, size, generator=torch.Generator().manual_seed(0)) * 3
    wanted = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if 0 < sampling.top_k < size:
        wanted = TopKLogitsWarper(sampling.top_k)(None, wanted)
    if sampling.top_p < 1:
        wanted = TopPLogitsWarper(sampling.top_p)(None, wanted)
    if sampling.min_p:
        wanted = MinPLogitsWarper(sampling.min_p)(None, wanted)
    # numbers in [0, 1) at equal distances hit each token as often as it is likely, to within one
    uniform = ((torch.arange(POINTS) + 0.5) / POINTS).tolist()
    rows = [draw(scores.expand(500, -1), [sampling] * 500, uniform[i : i + 500]) for i in range(0, POINTS, 500)]
    hits = torch.bincount(torch.cat(rows), minlength=size)
    assert (hits - wanted.softmax(-1)[0] * POINTS).abs().max() <= 1.1
    assert not hits[wanted[0] == -math.inf].any()


def test_rows_of_a_draw_are_on_their_own() -> None:
    samplings = [Sampling(0.7), Sampling(1.3, top_k=1), Sampling(5.0, top_p=0.3), Sampling(1.0, min_p=0.5)]
    generator = torch.Generator().manual_seed(1)
    scores, uniform = torch.randn(4, 30, generator=generator), torch.rand(4, generator=generator).tolist()
    together = draw(scores, samplings, uniform)
    alone = [draw(scores[i : i + 1], samplings[i : i + 1], uniform[i : i + 1]) for i in range(4)]
    assert together.tolist() == torch.cat(alone).tolist()
    assert together[1] == scores[1].argmax()


def test_a_number_just_below_one_draws_what_may_be_drawn() -> None:
    scores = torch.tensor([[3.0, -torch.inf, 2.0, -torch.inf]])
    assert draw(scores, [Sampling(1.0)], [math.nextafter(1.0, 0.0)]).item() == 2


def test_scores_that_are_no_numbers_do_no_harm() -> None:
    scores = torch.stack([torch.full((VOCABULARY,), torch.nan), torch.arange(VOCABULARY) * 1.0])
    for sampling in (Sampling(0.01), Sampling(0.01, top_p=0.5), Sampling(0.01, top_k=5)):
        assert draw(scores, [sampling] * 2, [0.5, 0.5])[1] == VOCABULARY - 1


@pytest.mark.filterwarnings("error")
def test_every_seed_of_64_bits_draws_its_own_numbers() -> None:
    seeds = [0, 1, 2**63 - 1, -(2**63), *range(-40, 0)]
    requests = [RequestState(name, [1]) for name in ("answer", *children("answer", 1))]
    drawn = {uniform(request, Sampling(1.0, seed=seed)) for seed in seeds for request in requests}
    assert len(drawn) == len(seeds) * len(requests)
    assert uniform(requests[0], Sampling(1.0, seed=np.int64(-1))) == uniform(requests[0], Sampling(1.0, seed=-1))
    # names that are no answer's
    odd = [RequestState(f"answer{CHILD}{number}", [1]) for number in ("\u00b2", "9" * 25, "9" * 5000)]
    odd.append(RequestState(5, [1]))  # type: ignore[arg-type]
    assert {uniform(request, Sampling(1.0)) for request in odd} == {uniform(requests[0], Sampling(1.0))}
    # a generator that was seeded by hand
    by_hand = np.random.Philox(counter=0, key=(1 << 64) | (2**64 - 40))
    assert uniform(requests[1], Sampling(1.0, seed=-40)) == np.random.Generator(by_hand).random()


@contextmanager
def running(model: PreTrainedModel, max_bytes: int = 64 << 20, **options: Any) -> Iterator[Any]:
    manager = model.init_continuous_batching(request_config(LOSSLESS, max_bytes, **options), chunks())
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)


def answers(manager: Any, count: int) -> dict[str, Any]:
    found = [manager.get_result(timeout=60) for _ in range(count)]
    assert all(output.error is None for output in found), [output.error for output in found]
    return {output.request_id: output for output in found}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("do_sample", [False, True])
def test_sampled_requests_beside_greedy_ones(model: PreTrainedModel, do_sample: bool) -> None:
    """Runs on an engine that takes the likeliest token, and on one that draws in another way."""
    ids = prompts()
    with running(model, do_sample=do_sample, temperature=3.0) as manager:
        manager.add_request(ids[0], "alone", max_new_tokens=NEW, sampling=DRAWN)
        alone = answers(manager, 1)["alone"].generated_tokens
        for i, prompt in enumerate(ids):
            manager.add_request(prompt, f"greedy {i}", max_new_tokens=NEW, sampling=Sampling())
        manager.add_request(ids[0], "other", max_new_tokens=NEW, sampling=Sampling(1.5, 40, 0.95, seed=8))
        manager.add_request(ids[0], "again", max_new_tokens=NEW, sampling=DRAWN)
        manager.add_request(ids[3], "engine's", max_new_tokens=NEW)
        found = answers(manager, len(ids) + 3)
    for i, prompt in enumerate(ids):
        assert found[f"greedy {i}"].generated_tokens == expected(model, prompt)
    assert found["again"].generated_tokens == alone != found["other"].generated_tokens
    assert (found["engine's"].generated_tokens == expected(model, ids[3])) is not do_sample


@pytest.mark.slow
def test_a_seed_outlasts_a_preemption(model: PreTrainedModel) -> None:
    ids = prompts((60, 50, 55, 45, 58, 48))
    samplings = [Sampling(1.2, seed=i) for i in range(len(ids))]
    with running(model) as manager:
        for i, prompt in enumerate(ids):
            manager.add_request(prompt, str(i), max_new_tokens=60, sampling=samplings[i])
        ample = answers(manager, len(ids))
    with running(model, TIGHT) as manager:
        prefilled = sum(map(len, ids))
        for i, prompt in enumerate(ids):
            manager.add_request(prompt, str(i), max_new_tokens=60, sampling=samplings[i])
        tight = answers(manager, len(ids))
        assert manager.statistics().prompt_tokens > prefilled
    for name, output in tight.items():
        assert output.generated_tokens == ample[name].generated_tokens


@pytest.mark.sampled(8)
@pytest.mark.parametrize("length", [40, 1])
def test_answers_to_one_prompt_differ_and_come_again(model: PreTrainedModel, length: int) -> None:
    ids, names = prompts((length,))[0], ["a", *children("a", 3)]

    def ask() -> list[list[int]]:
        with running(model) as manager:
            manager.submit(ids, "a", DRAWN, max_new_tokens=NEW, eos_token_id=-1, num_children=3)
            found = answers(manager, 4)
            assert manager.statistics().prompt_tokens <= length + 4
        return [found[name].generated_tokens for name in names]

    first = ask()
    assert len(set(map(tuple, first))) == 4
    assert ask() == first
    with running(model) as manager:
        manager.submit(ids, "b", DRAWN, max_new_tokens=NEW, eos_token_id=-1)
        assert answers(manager, 1)["b"].generated_tokens == first[0]


def test_logprobs_are_those_of_the_model(model: PreTrainedModel) -> None:
    ids = prompts((30,))[0]
    with running(model) as manager:
        manager.add_request(ids, "drawn", max_new_tokens=NEW, sampling=Sampling(2.0, top_k=9, seed=1, top_logprobs=3))
        manager.add_request(ids, "likeliest", max_new_tokens=NEW, sampling=Sampling(top_logprobs=0))
        manager.add_request(ids, "without", max_new_tokens=NEW, sampling=Sampling(1.0))
        found = answers(manager, 3)
    assert found["without"].logprobs == []
    for name, count in (("drawn", 3), ("likeliest", 0)):
        output = found[name]
        whole = torch.tensor([ids + output.generated_tokens])
        with torch.no_grad():
            logprobs = model(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        for row, token, noted in zip(logprobs, output.generated_tokens, output.logprobs, strict=True):
            assert isinstance(noted, TokenLogprobs)
            assert noted.logprob == pytest.approx(row[token].item(), abs=1e-4)
            top = row.topk(count)
            assert [each for each, _ in noted.top] == top.indices.tolist()
            assert [value for _, value in noted.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_what_a_generation_config_says() -> None:
    assert Sampling.of(GenerationConfig(temperature=0.5)).is_greedy
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.8, min_p=0.1)
    assert Sampling.of(config) == Sampling(0.5, 3, 0.8, 0.1)
    assert Sampling.of(GenerationConfig(do_sample=True, top_k=0)) == Sampling(1.0)
    with pytest.raises(ValueError, match="typical_p=0.5"):
        Sampling.of(GenerationConfig(do_sample=True, typical_p=0.5))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -1.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": math.nan}, {"seed": None}, {"seed": 1.5}),
        *({"top_logprobs": -1}, {"top_logprobs": 1.5}),
    ],
)
def test_what_has_no_meaning_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_an_engine_that_is_stopped_takes_nothing(model: PreTrainedModel) -> None:
    with running(model) as manager:
        pass
    with pytest.raises(RuntimeError, match="stop"):
        manager.submit([1], "a", Sampling(), max_new_tokens=1)


def test_an_engine_that_starts_again_takes_requests_at_once(model: PreTrainedModel) -> None:
    with running(model) as manager:
        pass
    manager.start()
    try:
        assert manager.check_request(5, None) == manager.memory().longest - 4
        manager.submit([1], "a", Sampling(), max_new_tokens=2)
        assert len(manager.get_result(timeout=60).generated_tokens) == 2
    finally:
        manager.stop()


def test_logprobs_of_the_engine_are_refused_beside_a_sampling(model: PreTrainedModel) -> None:
    manager = model.init_continuous_batching(request_config(LOSSLESS), chunks(return_logprobs=True))
    with pytest.raises(ValueError, match="top_logprobs"):
        manager.add_request([1, 2], sampling=Sampling(temperature=1.0))
    with pytest.raises(ValueError, match="top_logprobs"):
        manager.submit([1, 2], "a", Sampling(top_logprobs=1), max_new_tokens=1)
    assert manager.waiting == 0
    manager.stop()
