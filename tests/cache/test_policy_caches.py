"""Caches with every policy: thresholds learnt by a row move with it, and budgets are also kept."""

from __future__ import annotations

from pathlib import Path

import policy_simulation  # noqa: F401  makes "first_tokens" known
import pytest
import torch
from runs import CONFIG, assert_close_contents, assert_equal_contents, model_of, started, tokens
from saved_files import write_as_before
from tiny_models import ragged_prompts
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.store import settle

LENGTHS = (120, 33, 1, 64)
POLICIES = {
    "diffkv": {},
    "leankv": {"high_cut": 0.4, "low_cut": 0.1},
    "first_tokens": {"first": 6},
}


def config_of(policy: str, **options) -> DiffKVConfig:
    fields = {"alpha_high": 1.0, "alpha_low": 0.5, "window": 8, "page_bytes": 512, **options}
    return DiffKVConfig(policy=policy, policy_options=POLICIES[policy], sinks=0, **fields)


def alphas(cache: DiffKVCache) -> list[torch.Tensor]:
    (store,) = cache.stores.all
    settle(store)
    return [store.alpha_high.clone(), store.alpha_low.clone()]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(100)
def test_saved_caches_and_forks_continue_identically(model: PreTrainedModel, policy: str, tmp_path: Path) -> None:
    run = started(model, LENGTHS, config_of(policy))
    run.steps(tokens(4, 20))
    run.cache.save_pretrained(tmp_path, model)
    (fork,) = run.cache.fork(1)
    others = [run.on(DiffKVCache.from_pretrained(tmp_path, model)), run.on(fork)]
    before = alphas(fork)
    expected = run.steps(tokens(4, 12, 1)), run.feed(*ragged_prompts((30, 0, 5, 9), 2)), run.steps(tokens(4, 12, 3))
    assert all(torch.equal(*pair) for pair in zip(before, alphas(fork))), "a fork has thresholds of its own"
    for other in others:
        assert other.cache.config == run.cache.config
        found = other.steps(tokens(4, 12, 1)), other.feed(*ragged_prompts((30, 0, 5, 9), 2))
        found = (*found, other.steps(tokens(4, 12, 3)))
        assert all(torch.equal(*pair) for pair in zip(found, expected))
        assert_equal_contents(other.cache, run.cache)
        assert all(torch.equal(*pair) for pair in zip(alphas(other.cache), alphas(run.cache)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(100)
def test_rows_that_are_reordered_stay_what_they_were(model: PreTrainedModel, policy: str) -> None:
    """Reorders rows like beam search. Nothing in a row depends on its index."""
    index = [3, 0, 0, 1]
    run, straight = started(model, LENGTHS, config_of(policy)), started(model, LENGTHS, config_of(policy))
    first = tokens(4, 20)
    run.steps(first)
    run.select(index)
    more = tokens(4, 15, 5)
    run.steps(more)
    straight.steps(first)
    # the same tokens for the rows in their old order; row 1 stands for its copy
    for copy in (1, 2):
        other = straight.on(straight.cache.fork(1)[0])
        continued = torch.zeros_like(more)
        for new, old in ((0, 3), (copy, 0), (3, 1)):
            continued[old] = more[new]
        other.steps(continued)
        other.select(index)
        rows = [0, copy, 3]
        chosen = run.on(run.cache.fork(1)[0])
        chosen.select(rows)
        other.select(rows)
        assert_close_contents(chosen.cache, other.cache)
        torch.testing.assert_close(alphas(chosen.cache), alphas(other.cache))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(1000)
def test_max_bytes_holds_for_every_policy(model: PreTrainedModel, policy: str) -> None:
    def fed(max_bytes: int | None) -> DiffKVCache:
        run = started(model, (200, 90, 150), config_of(policy, max_bytes=max_bytes))
        for turn in range(2):
            for seed in range(40):
                run.feed(tokens(3, 1, seed))
                if max_bytes is not None:
                    assert run.cache.memory().bytes <= max_bytes
            run.feed(*ragged_prompts((40, 3, 60), seed=turn))
        run.cache.check_integrity()
        return run.cache

    free = fed(None).memory()
    tight = int(free.bytes - 0.3 * (free.bytes - 60_000))
    limited = fed(tight).memory()
    assert limited.bytes <= tight
    assert limited.tokens["window"] == free.tokens["window"]
    assert policy == "first_tokens" or limited.tokens["pruned"] > free.tokens["pruned"] + 20


def test_caches_saved_before_thresholds_were_per_request(model: PreTrainedModel, tmp_path: Path) -> None:
    """Format version 1 has thresholds [layers, heads], and a configuration without options."""
    run = started(model, LENGTHS, CONFIG)
    run.steps(tokens(4, 10))
    run.cache.save_pretrained(tmp_path, model)

    def per_layer_and_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = ("store0.alpha_high", "store0.alpha_low")
        return {**tensors, **{name: tensors[name][:, 0].clone() for name in names}}

    write_as_before(tmp_path, 1, ["policy_options"], per_layer_and_head)
    loaded = run.on(DiffKVCache.from_pretrained(tmp_path, model))
    assert torch.equal(loaded.steps(tokens(4, 12, 1)), run.steps(tokens(4, 12, 1)))
    assert_equal_contents(loaded.cache, run.cache)
