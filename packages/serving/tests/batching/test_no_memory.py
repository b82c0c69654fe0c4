"""A device without memory in the middle of continuous batching: who fails, who is told, and what goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batching import LOSSLESS, NEW, check_empty, check_slots, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching import shared_pages
from hf_diffkv_serving.batching import slots as slots_module
from hf_diffkv_serving.batching.slot_part import SlotPart
from test_continuous import Watch
from test_shared_pages import UNIFORM, arrive
from test_slots import assert_same_request, follow, make_slots, run
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_diffkv import PrefixStore


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, at: int = 2) -> None:
    """Makes a call of a method fail, the second one unless `at` says otherwise."""
    method, calls = getattr(owner, name), []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            raise error
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_prompt_without_memory_fails_alone(
    error: type[Exception], model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch, slots_module.PromptAttention, "attend", error("no memory"))
    given = prompts((30, 20, 12))
    outputs = list(model.generate_batch(given, request_config(LOSSLESS), chunks(96)).values())
    assert [output.error for output in outputs].count("no memory") == 1
    for ids, output in zip(given, outputs):
        assert output.error or output.generated_tokens == expected(model, ids)
    watch.assert_nothing_left()


def test_forks_without_memory_are_computed_anew(
    model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch, SlotPart, "provide", MemoryError("no memory"))
    config = request_config(LOSSLESS, num_return_sequences=3, do_sample=True, top_k=1)
    given = prompts((40, 9))
    outputs = list(model.generate_batch(given, config, chunks(max_requests_per_batch=8)).values())
    assert len(outputs) == 6
    for index, output in enumerate(outputs):
        assert output.generated_tokens == expected(model, given[index // 3])
    watch.assert_nothing_left()


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_copy_without_memory_leaves_nothing_of_a_fork(
    error: type[Exception], model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch, shared_pages, "copy_pages", error("no memory"))
    config = request_config(LOSSLESS, num_return_sequences=3, do_sample=True, top_k=1)
    ids = prompts((40,))[0]
    outputs = list(model.generate_batch([ids], config, chunks(max_requests_per_batch=8)).values())
    assert [output.generated_tokens for output in outputs] == [expected(model, ids)] * 3
    watch.assert_nothing_left()


@pytest.mark.parametrize("name", ["copy_pages", "look"])
def test_a_copy_without_memory_leaves_nothing_of_what_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = make_slots(UNIFORM)
    requests = [arrive(slots, UNIFORM, 1)]
    run(slots, requests, [75])
    slots.settle()
    assert slots.make_room(None, 75)
    follow(slots, requests)
    slot, held, before = slots.adopt(), slots.held(requests[0].slot), slots.used_pages
    owner = shared_pages if name == "copy_pages" else SlotPart
    with monkeypatch.context() as patched:
        failing_once(patched, owner, name, torch.OutOfMemoryError("no memory"), 1)
        with pytest.raises(torch.OutOfMemoryError):
            slots.load(slot, held, 75)
    slots.release(slot)
    check_slots(slots)
    assert (slots.used_pages == before).all()
    assert_same_request(slots, requests[0])


def test_all_are_told_of_a_device_that_takes_nothing_back(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is started again then, and nothing of it is used before the failure is."""
    manager = model.init_continuous_batching(request_config(LOSSLESS), chunks(max_requests_per_batch=2))
    given = prompts((30, 20, 12, 9))

    def fail(*arguments: Any) -> None:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patched:
        patched.setattr(SlotPart, "clear", fail)
        for ids in given:
            manager.add_request(ids, max_new_tokens=NEW)
        manager.start()
        spoiled = manager._cache
        results = [manager.get_result(timeout=20) for _ in given]
        assert all(result is not None and result.error == "the device failed" for result in results)
        manager.stop(keep_for_next_session=True)
    manager.start()
    name = manager.add_request(given[0], max_new_tokens=NEW)
    result = manager.get_result(name, timeout=60)
    found = manager._cache
    manager.stop()
    assert result.generated_tokens == expected(model, given[0])
    assert found is not spoiled
    check_empty(found.slots)


def test_prefixes_that_are_looked_up_without_memory_are_not_used(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch, PrefixStore, "look_ahead", MemoryError("no memory"))
    given = prompts((30, 20, 12))
    answers = [expected(model, ids) for ids in given]
    manager = model.init_continuous_batching(request_config(LOSSLESS), chunks())
    manager.use_prefixes(PrefixStore(model, LOSSLESS, device_bytes=1 << 20))
    manager.start()
    for ids, answer in zip(given, answers):
        name = manager.add_request(ids, max_new_tokens=NEW)
        assert manager.get_result(name, timeout=20).generated_tokens == answer
    manager.stop()
