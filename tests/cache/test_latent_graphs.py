"""Captured steps of models that cache latents give the text of steps from Python, with a recorded graph on a CPU."""

import interpreted  # noqa: F401
import pytest
import torch
from tiny_models import LATENT, greedy, ragged_prompts, tiny_model

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing


@pytest.fixture(scope="module")
def model():
    return tiny_model("deepseek_v3", **{**LATENT, "num_hidden_layers": 1, "first_k_dense_replace": 1})


def run(model, captured: bool, **fields):
    ids, mask = ragged_prompts((14, 11))
    cache = DiffKVCache(model, window=3, page_bytes=512, cuda_graphs=captured, **fields)
    output = greedy(model, ids, mask, 9, **passing(cache))
    cache.check_integrity()
    return torch.stack(output.logits), cache


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("fields", [{"high": "K8V8"}, {"high": "K8V5", "sinks": 1}])
def test_replays_give_the_logits_of_eager_steps(model, steps, fields) -> None:
    expected, eager = run(model, False, **fields)
    got, cache = run(model, True, **fields)
    assert torch.equal(got, expected)
    assert [(step.captures, step.replays) for step in steps] == [(1, 7)]
    store, other = cache.stores.all[0], eager.stores.all[0]
    for name in ("high_count", "low_count", "length", "window_start"):
        assert torch.equal(getattr(store, name), getattr(other, name)), name
    assert int(store.high_count.max()) > 14


@pytest.mark.usefixtures("recorded")
def test_steps_of_the_reference_are_not_captured(model, steps) -> None:
    """Kernels do not support latents with eight groups."""
    expected, _ = run(model, False, high="K8V4g1/8")
    got, cache = run(model, True, high="K8V4g1/8")
    assert torch.equal(got, expected) and cache.stores.all[0].ops.backend == "reference"
    assert [step.captures for step in steps] == [0]
