"""One cache on several backends in turn, like a pickled cache continued on a machine without native code."""

from __future__ import annotations

import pickle

import pytest
import torch
from native_code import needs_native
from runs import Run, tokens
from tiny_models import tiny_model

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend

EXACT = Precision(16, 16)
# lossless, with or without a choice between two tiers
CONFIGS = [
    DiffKVConfig(EXACT, Precision(16, 16, 2, 2), alpha_high=alpha, alpha_low=0.0, window=3) for alpha in (0.0, 1.0)
]


@needs_native
@pytest.mark.parametrize("config", CONFIGS, ids=["uniform", "chosen"])
@pytest.mark.parametrize("looks", [False, True], ids=["steps", "reports"])
def test_steps_and_reports_on_the_reference_after_native_ones(config: DiffKVConfig, looks: bool) -> None:
    model, dense = tiny_model("llama", "diffkv"), tiny_model("llama", "eager")
    run = Run(model, DiffKVCache(model.config, config), 2)
    with use_backend("native"):
        run.feed(tokens(2, 20))
        run.steps(tokens(2, 3, 2))
    with use_backend("reference"):
        if looks:
            run.cache.levels(0)
        run.cache = pickle.loads(pickle.dumps(run.cache))
        logits = run.steps(tokens(2, 3, 3))
    with use_backend("native"):
        logits = torch.cat([logits, run.steps(tokens(2, 12, 4))], 1)
    run.cache.check_integrity()
    expected = dense(run.ids, use_cache=False).logits[:, -15:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
