"""Pinned tokens stay at the high level under every policy, and do not change what becomes of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from dense_simulation import HIGH, LOW, PRUNED, WINDOW, Head, Rule
from given_stores import attend, begin
from test_compressed import Pair, left_padding
from test_policies import CASES, PLACE, config_of
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.native.library import library
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import read_tokens
from hf_diffkv.store.read import LayerTokens

PIN = (20, 85)
POLICIES = {"diffkv": ("diffkv", {}, Rule()), **CASES}


class Pinned(Rule):
    """Another rule, which does not see the pinned tokens in prompts and never finds them least significant."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.first = rule.first

    def holds(self, index: Tensor) -> Tensor:
        return (index >= PIN[0]) & (index < PIN[1])

    def unequalled(self, head: Head) -> Head:
        mean = torch.where(self.holds(head.index), torch.inf, head.mean)
        return dataclasses.replace(head, mean=mean)

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        pinned = self.holds(head.index)
        levels = self.rule.prompt(head, members & ~pinned, outside)
        return torch.where(pinned, torch.full_like(levels, HIGH), levels)

    def step(self, head: Head, candidate: int) -> list[tuple[int, int]]:
        if self.holds(head.index)[candidate]:
            return [(candidate, HIGH)]
        return self.rule.step(self.unequalled(head), candidate)

    def follow(self, head: Head, candidate: int) -> None:
        self.rule.follow(self.unequalled(head), candidate)


class PinnedPair(Pair):
    def compare_sums(self, tokens: LayerTokens) -> None:
        # sums of pinned tokens are what no other sum reaches
        huge = tokens.score > 1e5
        sums = self.simulation.sums()
        torch.testing.assert_close(tokens.score[~huge], sums[~huge], rtol=1e-5, atol=1e-6)
        assert not huge[tokens.levels == PRUNED].any()


def pair_of(case: str, interval: int) -> PinnedPair:
    policy, policy_options, rule = POLICIES[case]
    alphas = {"alpha_high": 1.5, "alpha_low": 0.8} if policy == "diffkv" else {}
    config = config_of(policy, policy_options, interval, pin=PIN, **alphas)
    return PinnedPair(config, 3, heads=2, group=2, dim=16, place=PLACE, rule=Pinned(rule))


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("case", POLICIES)
@pytest.mark.sampled(6)
def test_every_step_equals_the_simulation(case: str, interval: int) -> None:
    """The range ends in the window of the longest prompt, far beyond the end of the others; steps, a turn, steps."""
    pair = pair_of(case, interval)
    pair.follow(90, *[1] * 40, 23, *[1] * 10, valid=left_padding((90, 1, 37)))
    levels = read_tokens(pair.store, 0).levels
    assert (levels[0, :, PIN[0] : PIN[1]] == HIGH).all()
    assert ((levels == LOW) | (levels == PRUNED)).any()


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_narrow_numbers_hold_the_largest_sum(backend: str) -> None:
    """Sums of 16 bits saturate, which no other sum reaches either; everything else is pruned."""
    if backend == "native" and library() is None:
        pytest.skip("no native library")
    options = {"alpha_high": 50.0, "alpha_low": 50.0, "metadata_bits": 16}
    config = DiffKVConfig(**options, pin=(3, 40), window=8, sinks=2)
    pair = Pair(config, 1, heads=2, group=2, dim=32, dtype=torch.float32)
    with use_backend(backend):
        for tokens in (44, *[1] * 30):
            begin(pair.store, tokens)
            attend(pair.store, 0, [pair.draw(heads, tokens) for heads in (4, 2, 2)], Softmax(0.2))
    levels = read_tokens(pair.store, 0).levels[0]
    expected = torch.full((74,), PRUNED, dtype=torch.int8)
    expected[3:40], expected[:2], expected[-8:] = HIGH, WINDOW, WINDOW
    assert torch.equal(levels, expected.expand(2, -1))


def test_through_generate() -> None:
    """A budget that prunes nearly everything else; beams carry the pinned tokens with them."""
    model = tiny_model("llama", dtype=torch.float32)
    ids, mask = ragged_prompts((60, 60))
    cache = DiffKVCache(model.config, alpha_high=50.0, alpha_low=50.0, pin=(5, 30), window=8)
    model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=20, num_beams=2, do_sample=False)
    cache.check_integrity()
    for layer_idx in cache.compressed_layers():
        levels = cache.levels(layer_idx)
        assert (levels[:, :, 5:30] == HIGH).all()
        assert (levels[:, :, 30:60] == PRUNED).float().mean() > 0.9


@pytest.mark.parametrize("pin", [(3,), (3, 3), (5, 2), (-1, 4), "0:4", (0, 1.5), (0, True), 7, [[0, 4]]])
def test_what_is_no_range_is_refused(pin: Any) -> None:
    with pytest.raises(ValueError, match="pin="):
        DiffKVConfig(pin=pin)


def test_a_range_comes_back_from_json() -> None:
    config = DiffKVConfig(pin=[0, 12])
    assert config.pin == (0, 12)
    assert DiffKVConfig.from_json(config.to_json()) == config
