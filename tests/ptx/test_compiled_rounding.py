"""Rounding keys for queries in compiled code, against the reference."""

from __future__ import annotations

import pytest
import torch
from chosen_ops import feedback_of, second_moment
from selection import cases
from test_adaptive_rounding import assert_as_good, keys_and_queries, tier_of

from hf_diffkv.ops.rounding import launch


@cases("name, dim", [("K5V4", 24)], [("K4V3g2/1", 64), ("K5V4", 80), ("K4V4", 128)])
def test_keys_are_rounded(name: str, dim: int, emulator) -> None:
    tier = tier_of(name, dim)
    key, row, query = keys_and_queries(dim, torch.bfloat16)
    feedback = feedback_of(second_moment(query, 3))
    assert_as_good(launch.round_keys(key, row, feedback, tier), key, row, query, tier)
    assert {kernel for kernel, _ in emulator.launched} == {"round_keys_kernel"}


@pytest.mark.parametrize("dim", [24])
def test_matrices_are_factored(dim: int, emulator) -> None:
    moment = second_moment(keys_and_queries(dim, torch.float32)[2], 3)
    moment[1] = 0
    expected = feedback_of(moment.double())
    torch.testing.assert_close(launch.feedback_of(moment).double(), expected, rtol=1e-4, atol=1e-4)
    assert {kernel for kernel, _ in emulator.launched} == {"feedback_kernel"}
