"""Other threads that ask the engine for its figures while requests run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batching import LOSSLESS, LOSSY, NEW, chunks, prompts, request_config
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.memory import ServingMemory
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_diffkv import DiffKVConfig

metrics = pytest.importorskip("hf_diffkv_serving.server.metrics", exc_type=ImportError)
health = pytest.importorskip("hf_diffkv_serving.server.health", exc_type=ImportError)

WATCHED = (70, 5, 40, 90)


@pytest.fixture(autouse=True)
def threads_often_change() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def answers(model: Any, config: DiffKVConfig, watched: list[ServingMemory] | None) -> dict[str, list[int]]:
    """What each request is answered; `watched` gets the figures that another thread saw meanwhile."""
    manager = model.init_continuous_batching(request_config(config), chunks(32))
    told = metrics.Metrics(manager, health.Health(manager, grace=1))
    stopped, errors = threading.Event(), []

    def watch() -> None:
        try:
            while watched is not None and not stopped.is_set():
                watched.append(manager.statistics().memory)
                assert b"hf_diffkv_cache_held_bytes" in told.text("")[0]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watch, daemon=True)
    manager.start()
    thread.start()
    try:
        for number, ids in enumerate(prompts(WATCHED)):
            manager.add_request(ids, str(number), max_new_tokens=NEW)
        outputs = [manager.get_result(timeout=60) for _ in WATCHED]
    finally:
        stopped.set()
        thread.join(60)
        manager.stop(hard_stop=True)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return {output.request_id: output.generated_tokens for output in outputs}


@pytest.mark.parametrize("config", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_watched_requests_have_the_same_answers(config: DiffKVConfig) -> None:
    """Ten times; and the figures fit together."""
    model = tiny_model("llama")
    expected = answers(model, config, None)
    for _ in range(10):
        seen: list[ServingMemory] = []
        assert answers(model, config, seen) == expected
        assert any(found.requests for found in seen)
        # without requests no page is held
        assert all(found.free_share == 1 for found in seen if not found.requests)


@pytest.mark.parametrize("config", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_other_threads_see_what_the_engine_found_between_steps(
    config: DiffKVConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a forward, where pages are taken, the figures are those from before it."""
    asked: list[tuple[ServingMemory, ServingMemory]] = []
    before: list[ServingMemory] = []
    attend, extend = ContinuousCache.attend, ContinuousCache.extend_read_and_write_indices

    def elsewhere(cache: ContinuousCache) -> ServingMemory:
        found: list[ServingMemory] = []
        thread = threading.Thread(target=lambda: found.append(cache.memory()))
        thread.start()
        thread.join(60)
        return found[0]

    def watched_extend(self: ContinuousCache, *args: Any) -> None:
        before[:] = [elsewhere(self)]
        extend(self, *args)

    def watched_attend(self: ContinuousCache, layer: int, *args: Any, **options: Any) -> Any:
        output = attend(self, layer, *args, **options)
        asked.append((elsewhere(self), before[0]))
        # the engine's own thread is told what is there now
        changed.append(self.memory() != before[0])
        return output

    changed: list[bool] = []
    monkeypatch.setattr(ContinuousCache, "attend", watched_attend)
    monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", watched_extend)
    answers(tiny_model("llama"), config, None)
    assert asked and all(found == expected for found, expected in asked) and any(changed)


class Reads(TorchDispatchMode):
    """Counts the values of tensors that are read, for each of which a GPU must be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_the_engine_waits_for_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, listed = Reads(), []
    publish, tolist = ContinuousCache.publish, torch.Tensor.tolist

    def watched_publish(self: ContinuousCache) -> None:
        with reads, monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: listed.append(tensor) or tolist(tensor))
            publish(self)
        published.append(self)

    published: list[ContinuousCache] = []
    monkeypatch.setattr(ContinuousCache, "publish", watched_publish)
    answers(tiny_model("llama"), LOSSY, None)
    assert published and reads.count == 0 and not listed
    # the figures are there for whoever asks, once nothing is held
    assert published[-1].memory().free_share == 1


ASKED = {
    "memory": lambda manager: manager.memory(),
    "waiting": lambda manager: manager.waiting,
    "places": lambda manager: manager.places,
    "statistics": lambda manager: manager.statistics(),
    "check_request": lambda manager: manager.check_request(5, 5),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_manager_may_be_stopped_between_two_looks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = tiny_model("llama").init_continuous_batching(request_config(LOSSLESS), chunks(32))
    processor = SimpleNamespace(scheduler=SimpleNamespace(waiting_requests={}), prompt_tokens=0, generated_tokens=0)
    with monkeypatch.context() as patched:
        # what a `stop` sets to None is found once
        for attribute, found in (("_cache", [manager._cache]), ("batch_processor", [processor])):
            once = property(lambda _, found=found: found.pop() if found else None)
            patched.setattr(type(manager), attribute, once, raising=False)
        assert ASKED[name](manager) is not None
    manager.stop()
