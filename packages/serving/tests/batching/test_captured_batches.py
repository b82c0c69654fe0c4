"""Captured decode steps of changing batches give what steps from Python give, on the CPU with a recorded graph."""

from __future__ import annotations

import logging
from typing import Any

import interpreted  # noqa: F401
import pytest
import torch
from batching import check_empty, prompts, request_config
from hf_diffkv_serving.batching import engine  # noqa: F401  looks at what is watched below
from hf_diffkv_serving.batching.captured_steps import CapturedSteps
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from recorded_graph import RecordedGraph, record_launches
from tiny_models import tiny_model
from transformers import ContinuousBatchingConfig, PreTrainedModel

from hf_diffkv import DiffKVConfig
from hf_diffkv.cache import graphs
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import read_tokens

FIELDS = {"alpha_high": 1.1, "alpha_low": 0.5, "window": 3, "sinks": 1, "page_bytes": 512}
MAX_BYTES = 1 << 20
# prompt and new tokens of each request: three at once, then two, then one
REQUESTS = ((9, 9), (5, 12), (14, 6))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch):
    """Captures are recorded, and the kernels run in Triton's interpreter."""
    monkeypatch.setitem(graphs.GRAPH_TYPES, "cpu", RecordedGraph)
    record_launches(monkeypatch)
    monkeypatch.setattr("hf_diffkv.store.decode.SCRATCH_TOKENS", 64)
    with use_backend("kernels"):
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model("llama", num_hidden_layers=1, **sizes)


def run(
    model: PreTrainedModel,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    requests: tuple[tuple[int, int], ...] = REQUESTS,
) -> tuple[dict[str, Any], CapturedSteps | None, Any]:
    """Text and last levels, keys and sums of each request, what captured, and the cache."""
    held: dict[str, Any] = {}
    free = ContinuousCache.free_blocks

    def watched(cache: ContinuousCache, request_id: str, no_cache: bool = False) -> None:
        slot = cache._slot_of.get(request_id)
        if slot is not None and cache.slots.seen(slot):
            held[request_id] = read_tokens(cache.slots.held(slot)[0], 0)
        free(cache, request_id, no_cache)

    monkeypatch.setattr(ContinuousCache, "free_blocks", watched)
    wanted = request_config(DiffKVConfig(**FIELDS, cuda_graphs=captured), MAX_BYTES, max_new_tokens=12)
    batching = ContinuousBatchingConfig(max_batch_tokens=64, max_requests_per_batch=4, return_logprobs=True)
    manager = model.init_continuous_batching(wanted, batching)
    names = [
        manager.add_request(ids, max_new_tokens=new)
        for ids, (_, new) in zip(prompts(tuple(length for length, _ in requests)), requests)
    ]
    manager.start()
    outputs = {}
    while len(outputs) < len(names):
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            assert output.error is None
            outputs[output.request_id] = output
    processor = manager.batch_processor
    manager.stop()
    monkeypatch.setattr(ContinuousCache, "free_blocks", free)
    check_empty(processor.cache.slots)
    assert processor.cache.peak_bytes <= MAX_BYTES
    found = {name: (outputs[name].generated_tokens, outputs[name].logprobs, held[name]) for name in names}
    return found, processor.captured, processor.cache


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, (text, logprobs, held) in expected.items():
        mine = found[name]
        assert mine[0] == text
        torch.testing.assert_close(torch.tensor(mine[1]), torch.tensor(logprobs), rtol=1e-5, atol=1e-5)
        assert torch.equal(mine[2].levels, held.levels)
        torch.testing.assert_close(mine[2].keys, held.keys, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_batches_that_shrink(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, none, _ = run(model, False, monkeypatch)
    assert none is None
    found, steps, _ = run(model, True, monkeypatch)
    assert_same(found, expected)
    # three and four tokens share a graph; two and one have their own; one step ran from Python to warm up
    assert steps.captures == 3
    assert steps.replays >= 8
    assert {level for _, _, held in found.values() for level in held.levels.unique().tolist()} >= {1, 2, 3}


@pytest.mark.slow
def test_what_cannot_be_captured_runs_from_python(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _, _ = run(model, False, monkeypatch, ((5, 4),))
    monkeypatch.setattr(RecordedGraph, "capture", lambda self, work: (_ for _ in ()).throw(RuntimeError("no capture")))
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        found, steps, _ = run(model, True, monkeypatch, ((5, 4),))
    assert_same(found, expected)
    assert steps.captures == steps.replays == 0
    assert caplog.text.count("decode steps are not captured, which is slower: RuntimeError: no capture") == 1


def test_who_captures(model: PreTrainedModel) -> None:
    """Not who asks otherwise, nor what has sliding windows."""
    for fields, options, tiny, captures in (
        ({}, {}, model, True),
        ({"cuda_graphs": False}, {}, model, False),
        ({}, {"use_cuda_graph": False}, model, False),
        ({}, {"use_cuda_graph": True}, model, True),
        ({}, {}, tiny_model("gemma3_text"), False),
    ):
        wanted = request_config(DiffKVConfig(**FIELDS, **fields), MAX_BYTES)
        manager = tiny.init_continuous_batching(wanted, ContinuousBatchingConfig(max_requests_per_batch=2, **options))
        manager.warmup()
        assert (manager.batch_processor.captured is not None) == captures
        manager.stop()
