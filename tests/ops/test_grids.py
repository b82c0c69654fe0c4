"""Grids for prompts of more than a million tokens, without running a program: CUDA bounds all axes but the first."""

from __future__ import annotations

from typing import Any

import interpreted  # noqa: F401
import pytest
import torch
from test_store_by_thresholds_kernel import State
from triton.runtime.interpreter import GridExecutor

from hf_diffkv.config import Precision
from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.ops.rotation_kernel import rotate
from hf_diffkv.ops.store_prompt.launch import store_prompt
from hf_diffkv.ops.store_prompt.tokens import Placement, PromptTokens

TOKENS, DIM, LARGEST = 1_100_000, 128, 65_535


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}

    def note(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        found[executor.fn.__name__] = executor.grid

    monkeypatch.setattr(GridExecutor, "__call__", note)
    return found


def long() -> torch.Tensor:
    """Keys that use no memory."""
    return torch.zeros(1, 1, 1, DIM, dtype=torch.float16).expand(2, 1, TOKENS, DIM)


@pytest.mark.parametrize("scored", [False, True])
def test_long_prompts_are_stored(grids: dict[str, tuple[int, ...]], scored: bool) -> None:
    state = State(Precision(5, 4), Precision(3, 3), torch.float16, dim=DIM, heads=1, scored=scored)
    # a turn over as many tokens as it adds
    received = torch.zeros(1).expand(2, 1, 2 * TOKENS) if scored else None
    placement = Placement(6, 1e4, feedback=torch.eye(DIM).expand(2, DIM, DIM))
    store_prompt(state.rows, PromptTokens(long(), long()), placement, TOKENS, received)
    assert {"level_new_kernel", "demote_kernel"} <= grids.keys() if scored else "choose_codes_kernel" in grids
    assert all(max(grid[1:], default=1) <= LARGEST for grid in grids.values()), grids


def test_long_prompts_are_rotated(grids: dict[str, tuple[int, ...]]) -> None:
    rotate(long(), rotation_matrix(DIM, torch.float32, torch.device("cpu")))
    assert max(grids["rotate_kernel"][1:]) <= LARGEST
