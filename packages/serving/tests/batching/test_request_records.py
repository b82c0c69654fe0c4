"""Records of requests in the engine: tokens, times, and the reason of the end."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batching import LOSSLESS, NEW, check_empty, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.manager import DiffKVBatchingManager
from hf_diffkv_serving.batching.records import RequestRecord
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVConfig, PrefixStore

LONG = 400


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def started(model: PreTrainedModel) -> Iterator[Callable]:
    """Starts a manager of given options, and stops it whatever becomes of the test."""
    managers = []

    def start(config: DiffKVConfig = LOSSLESS, prefixes: PrefixStore | None = None, **options: Any) -> Any:
        managers.append(model.init_continuous_batching(request_config(config), chunks(**options)))
        if prefixes is not None:
            managers[0].use_prefixes(prefixes)
        managers[0].start()
        return managers[0]

    yield start
    managers[0].stop(hard_stop=True)


class Ended(dict):
    """Records of requests that have ended, by name."""

    def __init__(self, manager: DiffKVBatchingManager) -> None:
        manager.records.ended = lambda record: self.__setitem__(record.request_id, record)

    def wait(self, request_id: str) -> RequestRecord:
        until(lambda: request_id in self)
        return self[request_id]


def until(done: Any) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_tokens_times_and_reasons(model: PreTrainedModel, started: Callable) -> None:
    ids = prompts((40, 12))
    answer = expected(model, ids[0])
    manager = started(tokens=16)
    ended = Ended(manager)
    before = time.perf_counter()
    manager.add_request(ids[0], "limit")
    manager.add_request(ids[0], "end of text", eos_token_id=answer[4])
    manager.add_request(ids[1], "too long", max_new_tokens=10**6)
    found = ended.wait("limit")
    assert (found.prompt_tokens, found.generated_tokens, found.cached_tokens) == (40, NEW, 0)
    assert before <= found.created < found.first_token < found.last_token <= found.ended <= time.perf_counter()
    assert found.finish_reason == "length"
    found = ended.wait("end of text")
    assert (found.generated_tokens, found.finish_reason) == (answer.index(answer[4]) + 1, "stop")
    found = ended.wait("too long")
    assert (found.generated_tokens, found.first_token, found.finish_reason) == (0, None, "error")
    assert manager.records.get("limit") is None


def test_tokens_of_a_kept_prefix(model: PreTrainedModel, started: Callable) -> None:
    (ids,) = prompts((50,))
    answer = expected(model, ids)
    manager = started(prefixes=PrefixStore(model, LOSSLESS, device_bytes=4 << 20))
    ended = Ended(manager)
    manager.add_request(ids, "first")
    ended.wait("first")
    manager.add_request(ids + answer + ids[:9], "second")
    found = ended.wait("second")
    # all but the last token of an answer is kept
    assert (ended["first"].cached_tokens, found.cached_tokens) == (0, len(ids) + NEW - 1)
    assert found.prompt_tokens == 50 + NEW + 9


def test_a_request_that_is_ended_hands_out_what_there_is(model: PreTrainedModel, started: Callable) -> None:
    """While it is answered, and while it waits; its memory is free then."""
    (ids,) = prompts((30,))
    answer = expected(model, ids)
    manager = started(max_requests_per_batch=1)
    ended = Ended(manager)
    manager.add_request(ids, "answered", max_new_tokens=LONG, streaming=True)
    manager.add_request(ids, "waits", max_new_tokens=LONG)
    manager.add_request(ids, "cancelled", max_new_tokens=LONG)
    until(lambda: manager.records.get("answered").generated_tokens > 3)
    manager.end_request("waits", "timeout")
    output = next(iter(manager.request_id_iter("waits")))
    assert output.is_finished() and output.error is None and output.generated_tokens == []
    manager.cancel_request("cancelled")
    manager.end_request("answered", "timeout")
    *_, output = manager.request_id_iter("answered")
    assert output.is_finished() and output.error is None
    said = output.generated_tokens
    assert 3 < len(said) < LONG and said[:NEW] == answer[: len(said)]
    found = {name: ended.wait(name).finish_reason for name in ("waits", "answered", "cancelled")}
    assert found == {"waits": "timeout", "answered": "timeout", "cancelled": "cancelled"}
    assert ended["answered"].generated_tokens == len(said)
    until(lambda: manager.memory().requests == 0)
    assert manager.memory().free_share == 1
    # a name that nobody has
    manager.end_request("waits", "timeout")
    manager.add_request(ids, "next")
    assert ended.wait("next").finish_reason == "length"
    cache = manager.batch_processor.cache
    manager.stop()
    check_empty(cache.slots)
    manager.start()


def test_what_is_held_now_and_at_most(started: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = started(DiffKVConfig(alpha_high=1.0, alpha_low=0.4, window=16), tokens=256)
    cache: ContinuousCache = manager._cache
    pages, held = [], []
    attend = ContinuousCache.attend

    def beside() -> int:
        return cache.bytes - sum(part.store.pool.bytes for part in cache.slots.parts)

    def watched(self: ContinuousCache, layer: int, *args: Any, **options: Any) -> Any:
        output = attend(self, layer, *args, **options)
        (part,) = self.slots.parts
        pages.append(int(self.slots.used_pages.sum()) * part.store.layout.page_bytes)
        held.append(self.memory().held_bytes - beside())
        return output

    monkeypatch.setattr(ContinuousCache, "attend", watched)
    for request_id, ids in enumerate(prompts((200, 200, 200))):
        manager.add_request(ids, str(request_id))
    for _ in range(3):
        assert manager.get_result(timeout=60) is not None
    until(lambda: manager.memory().requests == 0)
    # beside pages there is the free list, of a few bytes each
    assert max(pages) > 0 and all(page <= each < page + max(pages) / 10 for page, each in zip(pages, held))
    found = manager.memory()
    assert found.held_bytes < beside() + max(pages) / 10
    assert found.peak_bytes >= max(pages) + beside()


def test_a_name_that_is_taken_changes_nothing_of_the_first(model: PreTrainedModel, started: Callable) -> None:
    ids, other = prompts((150, 9))
    said = expected(model, ids, LONG)
    manager = started(prefixes=PrefixStore(model, LOSSLESS))
    ended = Ended(manager)
    manager.add_request(ids, request_id="a", max_new_tokens=LONG, boundaries=[100], streaming=True)
    manager.get_result(timeout=60)
    manager.add_request(other, request_id="a", max_new_tokens=1)
    results = [manager.get_result(timeout=60)]
    while results[-1].status.name != "FINISHED":
        results.append(manager.get_result(timeout=60))
    (refused,) = [result for result in results if result.error is not None]
    assert "belongs to a request" in refused.error and refused.generated_tokens == []
    record = ended.wait("a")
    assert record.finish_reason == "length" and record.generated_tokens == LONG and record.boundaries == (100,)
    assert results[-1].generated_tokens == said


def test_a_full_queue_keeps_no_record(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = model.init_continuous_batching(request_config(LOSSLESS), chunks())

    def full(*args: Any, **options: Any) -> None:
        raise queue.Full

    monkeypatch.setattr(manager.input_queue, "put", full)
    with pytest.raises(queue.Full):
        manager.add_request([1, 2], request_id="a")
    assert manager.records.get("a") is None
    manager.stop()
