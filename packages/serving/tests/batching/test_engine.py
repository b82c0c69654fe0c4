"""Checks of the names used from Transformers' engine. A release that differs is refused with its number."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
import time
from typing import Any

import pytest
import torch
from batching import LOSSLESS, chunks, request_config
from hf_diffkv_serving.batching import engine as continuous_engine
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.shapes import AttentionShape
from hf_diffkv_serving.batching.slots import Slots
from hf_diffkv_serving.compat import BATCHING
from tiny_models import tiny_model
from transformers import GenerationConfig
from transformers.generation.continuous_batching import (
    continuous_api,
    input_outputs,
    model_runner,
    offloading_manager,
    requests,
    scheduler,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from hf_diffkv import DiffKVConfig

ENGINE = "hf_diffkv_serving.batching.engine"


@pytest.fixture
def reimported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next import of the adapter runs it anew."""
    for name in (ENGINE, f"{ENGINE}_names", "hf_diffkv_serving.batching.manager"):
        if name in sys.modules:
            monkeypatch.delitem(sys.modules, name)


def test_this_release_is_as_expected() -> None:
    assert BATCHING.missing() == continuous_engine.CALLED.missing() == []


def test_a_hint_of_one_length_alone_plans_for_nothing() -> None:
    model = tiny_model("llama")
    longest = []
    for hints in (None, WorkloadHints(max_generated_length=8), WorkloadHints(max_prompt_length=8)):
        manager = model.init_continuous_batching(request_config(LOSSLESS), chunks(), hints)
        longest.append(manager.memory().longest)
        manager.stop()
    assert longest[0] > 16 and longest == longest[:1] * 3


def test_an_older_release_is_refused(reimported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.3")
    with pytest.raises(ImportError, match=r"transformers>=5\.23, but this is 5\.22\.3"):
        model.init_continuous_batching(GenerationConfig(cache_implementation="diffkv"))
    assert model.config._attn_implementation == "sdpa"


def test_a_release_that_changed_is_refused(reimported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def update_batch(self: object, outputs: list) -> None:
        """Another signature."""

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "update_batch", update_batch)
    monkeypatch.delattr(scheduler.Scheduler, "finish_request")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0")
    with pytest.raises(ImportError) as raised:
        importlib.import_module(ENGINE)
    for part in ("5.99.0", "ContinuousBatchProcessor.update_batch", "Scheduler.finish_request", "report"):
        assert part in str(raised.value)


def test_the_engine_asks_its_cache_for_nothing_else() -> None:
    shape = AttentionShape(1, 1, 8, 8, torch.float32, torch.device("cpu"))
    cache = ContinuousCache(Slots(DiffKVConfig(alpha_high=1.0), shape, 1, 2, max_tokens=64, max_bytes=1 << 20), [0], 64)
    asked = set()
    for module in (continuous_api, input_outputs, model_runner, offloading_manager, requests, scheduler):
        # comments and docstrings name `cache.update`, which attention functions call
        code = re.sub(r"#.*", "", inspect.getsource(module))
        asked |= set(re.findall(r"\b(?:self\.)?cache\.([a-z]\w*)\b(?! import)", code))
    asked -= {"update"}
    assert len(asked) > 20
    assert {name for name in asked if not hasattr(cache, name)} == set()


def test_a_failed_engine_hands_out_its_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are waited for while requests are being failed."""
    manager = tiny_model("llama").init_continuous_batching(request_config(LOSSLESS), chunks())
    failing, fail = threading.Event(), manager._fail_all_remaining_requests

    def step() -> None:
        raise RuntimeError("broken")

    def fail_late(*args: Any) -> None:
        failing.set()
        time.sleep(0.5)
        fail(*args)

    monkeypatch.setattr(manager, "_generation_step", step)
    monkeypatch.setattr(manager, "_fail_all_remaining_requests", fail_late)
    manager.start()
    manager.add_request([3, 4, 5], "one")
    try:
        assert failing.wait(60) and str(manager.failure) == "broken"
        result = manager.get_result(timeout=60)
        assert result is not None and result.error == "broken"
    finally:
        manager.stop()
