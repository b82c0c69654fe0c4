"""Rows with one tier each that receive a prompt: kernels and plain PyTorch end with the same bytes."""

from __future__ import annotations

import copy
import math

import interpreted  # noqa: F401
import pytest
import torch
import uniform_oracle
from test_store_by_thresholds_kernel import PAGES, State, assert_alike

from hf_diffkv.config import Precision
from hf_diffkv.ops.store_prompt.launch import store_prompt

K5V4, K3V3 = Precision(5, 4), Precision(3, 3)
# for two heads of two requests
LOW_ROWS = [[True, False], [False, True]]


def state_of(high: Precision, low: Precision, dtype: torch.dtype, **fields: object) -> State:
    """Rows without scores, including low ones."""
    state = State(high, low, dtype, heads=2, scored=False, **fields)
    state.rows.alpha_high.copy_(torch.where(torch.tensor(LOW_ROWS), math.inf, 0.0))
    return state


def compare_turns(state: State, turns: tuple, exact: bool = True, **options: object) -> None:
    """Compares after each turn: new tokens, and how many of the second request's are padding."""
    for tokens, padded in turns:
        want = copy.deepcopy(state)
        new, placement, received = state.turn(tokens, padded, **options)
        store_prompt(state.rows, new, placement, received.shape[-1] - tokens)
        uniform_oracle.store_prompt(want.rows, new, placement)
        assert_alike(state, want, exact)
        state.rows.pages.copy_(want.rows.pages)
    owned = state.rows.page_table[state.rows.page_table > 0].tolist()
    assert sorted(owned + state.rows.free_list.ids().tolist()) == list(range(1, PAGES))
    low = torch.tensor(LOW_ROWS)
    assert not state.rows.high_count[low].any() and not state.rows.low_count[~low].any()
    assert state.page_count(0)[~low].min() > 1 and state.page_count(1)[low].min() > 1
    assert not state.rows.invalid


@pytest.mark.parametrize(
    "high, low, dtype, fields",
    [
        (K5V4, K3V3, torch.bfloat16, {"bits": 16}),
        (Precision(16, 8), Precision(3, 5), torch.float16, {"sinks": 0}),
        (Precision(8, 4), Precision(4, 2, 2, 4), torch.float32, {"rotates": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [2, 256])
@pytest.mark.slow
def test_turns(high, low, dtype, fields, chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, prompts that stay in their windows and leave them, partly filled pages; more rows than are counted at a
    time."""
    monkeypatch.setattr("hf_diffkv.ops.store_prompt.launch.CHUNK", chunk)
    state = state_of(high, low, dtype, **fields)
    compare_turns(state, ((5, 3), (60, 7), (35, 0), (3, 1), (1, 0)), exact=not state.rotates)


def matrices_of(state: State) -> torch.Tensor:
    """Feedback of four rows."""
    dim = state.dim
    return torch.eye(dim) + torch.rand(4, dim, dim, generator=state.generator).triu(1) * 4 / dim


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.slow
def test_keys_of_few_bits_are_rounded(dim: int) -> None:
    """Rounds low-bit keys for queries, but not 8-bit keys."""
    for high, low in ((K5V4, K3V3), (Precision(8, 4), Precision(4, 3, 2, 1))):
        state = state_of(high, low, torch.float32, dim=dim)
        compare_turns(state, ((60, 5), (40, 0)), feedback=matrices_of(state))
