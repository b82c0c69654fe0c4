"""Every policy against the dense simulation, step by step, and how policies are made known."""

from __future__ import annotations

from typing import Any

import policy_simulation as rules
import pytest
import torch
from dense_simulation import PRUNED, Rule
from given_stores import attend_prompt
from test_compressed import Pair, left_padding

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import HIGH_LEVEL, LOW_LEVEL, PRUNED_LEVEL, WINDOW_LEVEL
from hf_diffkv.policy import POLICIES, ForwardRows, Policy, Tokens, register_policy
from hf_diffkv.store import begin_forward, read_tokens

WINDOW_TOKENS = 12
PLACE = (1, 5)
CASES: dict[str, tuple[str, dict[str, Any], Rule]] = {
    "leankv": ("leankv", {"high_cut": 0.3, "low_cut": 0.1}, rules.LeanKV(0.3, 0.1)),
    "leankv without pruning": ("leankv", {"high_cut": 0.5}, rules.LeanKV(0.5)),
    "first tokens": ("first_tokens", {"first": 3}, rules.FirstTokens(3)),
}


def config_of(policy: str, policy_options: dict[str, Any], **options: Any) -> DiffKVConfig:
    return DiffKVConfig(
        policy=policy,
        policy_options=policy_options,
        window=WINDOW_TOKENS,
        sinks=0,
        page_bytes=512,
        **options,
    )


def pair_of(case: str, batch: int, **options: Any) -> Pair:
    policy, policy_options, rule = CASES[case]
    config = config_of(policy, policy_options, **options)
    return Pair(config, batch, heads=2, group=2, dim=16, place=PLACE, rule=rule)


def test_every_policy_has_a_case() -> None:
    assert {policy for policy, _, _ in CASES.values()} | {"diffkv"} == set(POLICIES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_every_step_equals_the_simulation(case: str) -> None:
    """A padded prompt, 60 steps, a further turn with gaps, 40 steps of which some rows take no part in."""
    pair = pair_of(case, 4)
    pair.follow(90, *[1] * 60, valid=left_padding((90, 1, 37, 12)))
    pair.follow(23, valid=torch.rand(4, 23, generator=torch.Generator().manual_seed(1)) > 0.3)
    for step in range(40):
        pair.follow(1, valid=torch.tensor([[True], [True], [step % 3 > 0], [step > 20]]))


def test_the_example_keeps_the_ends() -> None:
    lengths = (1, 12, 13, 14, 40, 111, 212)
    config = config_of("first_tokens", {"first": 2})
    pair = Pair(config, len(lengths), heads=3, group=1, dim=16)
    begin_forward(pair.store, max(lengths))
    pair.store.padding.append(max(lengths), left_padding(lengths))
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, len(lengths), 3, max(lengths), 16, generator=generator, dtype=torch.float64)
    attend_prompt(pair.store, 0, query, key, value, softmax=Softmax(0.25), valid=left_padding(lengths))
    for row, length in enumerate(lengths):
        levels = read_tokens(pair.store, 0).levels[row, :, -length:]
        kept = (levels > PRUNED).nonzero()[:, 1].unique().tolist()
        assert kept == sorted({*range(min(2, length)), *range(max(0, length - WINDOW_TOKENS), length)})


def test_policies_are_registered_once() -> None:
    with pytest.raises(ValueError, match="'diffkv' is the name of another policy"):
        register_policy("diffkv", POLICIES["first_tokens"])
    register_policy("first_tokens", POLICIES["first_tokens"])
    for wrong in (Policy(), int, "leankv"):
        with pytest.raises(ValueError, match="must be a class that extends hf_diffkv.policy.Policy"):
            register_policy("wrong", wrong)
    assert "wrong" not in POLICIES


@pytest.mark.parametrize("name", ["h2o", "pyramid", "random", "share", "snapkv", "streaming"])
def test_policies_that_were_removed_name_what_to_use(name: str) -> None:
    with pytest.raises(ValueError, match=f"policy='{name}' was removed; kvpress .* examples/own_policy.py"):
        DiffKVConfig(policy=name)


def test_of_equally_significant_tokens_the_oldest_are_pruned_first() -> None:
    row = torch.tensor([2, 0, 2, 0, 2, 0])
    mean = torch.tensor([1.0, 5.0, 1.0, 5.0, 1.0, 0.0])
    position = torch.tensor([4, 1, 9, 0, 6, 2])
    none = torch.zeros(4)
    rows = ForwardRows(0, 1, torch.full((4,), 10), torch.full((4,), 3), none, none)
    level = torch.full((6,), WINDOW_LEVEL, dtype=torch.int8)
    decided = POLICIES["leankv"](high_cut=0.9, low_cut=0.5).levels(Tokens(row, mean, position, level), rows)
    # shares: 1/3, 1, 1, 1/2, 2/3, 0
    assert decided.level.tolist() == [PRUNED_LEVEL, HIGH_LEVEL, HIGH_LEVEL, LOW_LEVEL, LOW_LEVEL, PRUNED_LEVEL]
