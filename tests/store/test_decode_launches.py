"""Launches of a decode step on a GPU, counted on the CPU."""

from __future__ import annotations

from dataclasses import replace

import interpreted  # noqa: F401
import pytest
import torch
from given_stores import attend_prompt, attend_step, new_store
from launches import Launches
from test_compressed import left_padding

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import begin_forward, check_integrity

LEVELS = DiffKVConfig(Precision(8, 4), Precision(4, 2), alpha_high=1.0, alpha_low=0.1, window=4, center=False)


@pytest.mark.parametrize(
    "config, expected",
    [
        (replace(LEVELS, rotate=False), ["append_kernel", "attend_kernel", "finish_kernel"]),
        (LEVELS, ["append_kernel", "attend_kernel", "finish_kernel", "rotate_kernel"]),
        (
            DiffKVConfig.preset("balanced", window=4),
            ["append_kernel", "attend_kernel", "finish_kernel", "rotate_kernel"],
        ),
    ],
    ids=["levels", "rotated", "preset"],
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.sampled(100)
def test_launches_of_a_layer(config: DiffKVConfig, expected: list[str], padded: bool, monkeypatch) -> None:
    """The kernel that appends also rotates and increments lengths, and nothing is read."""
    store = new_store(config, 2, 2, 1, 16, 16, torch.float32, torch.device("cpu"))
    counter, generator = Launches(monkeypatch), torch.Generator().manual_seed(0)
    with use_backend("kernels"), torch.no_grad():
        for tokens in (6, 1):
            begin_forward(store, tokens)
            valid = left_padding((tokens, tokens - 1)) if padded else None
            for layer in range(2):
                inputs = [torch.randn(2, heads, tokens, 16, generator=generator) for heads in (2, 1, 1)]
                if tokens > 1:
                    attend_prompt(store, layer, *inputs, softmax=Softmax(0.2), valid=valid)
                    continue
                counter.launched.clear()
                with counter:
                    attend_step(
                        store, layer, *inputs, softmax=Softmax(0.2), valid=None if valid is None else valid[:, 0]
                    )
                assert [what for _, what in counter.launched] == expected
                assert not counter.reads
    assert store.length.tolist() == [[7, 5 if padded else 7]] * 2
    check_integrity(store)
