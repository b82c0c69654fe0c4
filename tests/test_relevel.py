"""Prompts of stores that choose by thresholds: kernels that read nothing, against the dense simulation."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from launches import Launches
from test_compressed import Pair, left_padding
from test_rotated import RotatedPair

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import Store, attend_tokens, check_integrity, forward, prompt

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

MIXED = {"alpha_high": 1.0, "alpha_low": 0.5, "window": 8, "page_bytes": 1280}


def relevel_at_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Has tokens be levelled at once, by kernels or by their reference, while all else runs as it does on a CPU."""
    for module in ("prompt", "transform", "state"):
        monkeypatch.setattr(f"hf_diffkv.store.{module}.enters_at_once", lambda store: store.policy.by_thresholds)
    monkeypatch.setattr("hf_diffkv.ops.relevel.use_kernels", lambda device, dtype: how == "kernels")


def run(pair: Pair) -> None:
    """Padded prompts that stay in their windows and leave them, turns over what is stored, and steps."""
    with use_backend("reference"):
        pair.forward(7, left_padding((7, 3)))
        pair.compare()
        pair.forward(60, torch.tensor([[True] * 60, [False] * 24 + [True] * 36]))
        pair.compare()
        before = (pair.store.high_count.clone(), pair.store.low_count.clone())
        for _ in range(2):
            pair.forward(1)
        pair.compare()
        # what was stored receives little of so many queries
        pair.forward(80)
        pair.compare()
        assert (pair.store.high_count + pair.store.low_count < before[0] + before[1] + 80).all()
        pair.forward(5)
        for _ in range(3):
            pair.forward(1)
        pair.compare()
    counts = pair.level_counts()
    assert all(counts[level] > 10 for level in (0, 1, 2)), counts
    assert not pair.store.invalid


@pytest.mark.parametrize(
    "how, dtype, fields",
    [
        ("kernels", torch.bfloat16, {"paper": True, "alpha_high": ((1.0, 1.4),), "alpha_low": ((0.5, 0.2),)}),
        ("kernels", torch.float32, {"sinks": 3, "metadata_bits": 16, "pin": (4, 9)}),
        ("kernels", torch.float16, {"rotate": False, "low": Precision(4, 2, 2, 4), "adaptive_rounding": True}),
        ("reference", torch.float32, {"sinks": 3, "metadata_bits": 16}),
        ("reference", torch.bfloat16, {"paper": True}),
    ],
    ids=str,
)
@pytest.mark.sampled(10)
def test_prompts_turns_and_steps(how: str, dtype: torch.dtype, fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    relevel_at_once(monkeypatch, how)
    fields = {**MIXED, **fields}
    make = DiffKVConfig.paper if fields.pop("paper", False) else DiffKVConfig
    pair = RotatedPair(make(**fields), 2, 2, 2, 64, dtype)
    if dtype != torch.float32:
        # outputs of at most 16 are rounded before and after they are rotated back
        pair.output_tolerance = 16 * 2**-8
        pair.score_tolerance = 1e-4
    run(pair)
