"""A thousand requests on a tight budget, some cancelled, preempted, refused or failing: nothing is left behind."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from batching import LOSSLESS, SEVERAL, check_empty, check_slots, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine import DiffKVBatchProcessor
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from tiny_models import tiny_model
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.scheduler import Scheduler

from hf_diffkv import DiffKVConfig

SLOTS, CHUNK, NEW, OUTSTANDING = 6, 32, 20, 30
# with a window so short that slots leave room for more requests than pages do
LOSSY = DiffKVConfig(alpha_high=0.5, alpha_low=0.1, window=4)
# tokens of a prompt that takes several forwards
LONG = 2 * CHUNK
STEPS_BETWEEN_CHECKS = 50
# of a hundred requests
CANCELLED = ("waiting",) * 4 + ("in the prompt",) * 3 + ("decoding",) * 3
FAILING = ("spoiled in the prompt", "spoiled later", "too long")


class Traffic:
    """Requests to a manager, with planned failures of some, and the outcome of each.

    Attributes:
        prompt: index of each request's prompt, by name.
        new: most new tokens of each request, by name.
        fate: fate of each request, by name; one of `CANCELLED`, `FAILING` or "".
        results: outputs by name.
        cancelled: number of cancelled requests, by the state in which the engine gave them up.
        preempted: number of preemptions.
        steps: number of forwards.
    """

    def __init__(self, config: DiffKVConfig, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = tiny_model("llama")
        options = chunks(CHUNK, max_requests_per_batch=SLOTS, safety_margin=0.0)
        self.manager = self.model.init_continuous_batching(request_config(config, max_bytes), options)
        self.max_bytes = max_bytes
        self.prompts = prompts(tuple(range(1, 41)) + (LONG, LONG + 3))
        self.answers = {}
        self.prompt: dict[str, int] = {}
        self.new: dict[str, int] = {}
        self.fate: dict[str, str] = {}
        self.results: dict[str, Any] = {}
        self.cancelled: Counter[str] = Counter()
        self.preempted = self.steps = 0
        self.caches: list[ContinuousCache] = []
        self._watch(monkeypatch)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        extend, attend = ContinuousCache.extend_read_and_write_indices, ContinuousCache.attend
        update, offload = DiffKVBatchProcessor.update_batch, OffloadingManager.offload_requests
        clear = Scheduler.clear_cancelled_requests
        packed: list[tuple[str, int, int]] = []

        def extended(cache: ContinuousCache, name: str, past: int, tokens: int, *indices: Any) -> None:
            if not cache._coming:
                packed.clear()
            packed.append((name, past, tokens))
            fate, prompt = self.fate[name], self.length(name)
            if fate == "in the prompt" and past + tokens < prompt or fate == "decoding" and past > prompt:
                self.manager.cancel_request(name)
            extend(cache, name, past, tokens, *indices)

        def attended(cache: ContinuousCache, layer: int, query: Any, key: Any, value: Any, *options: Any) -> Any:
            at = 0
            for name, past, tokens in packed:
                fate, began = self.fate[name], past >= self.length(name)
                if layer == 1 and (fate == "spoiled in the prompt" or fate == "spoiled later" and began):
                    key = key.clone()
                    key[:, :, at] = torch.inf
                at += tokens
            output = attend(cache, layer, query, key, value, *options)
            assert cache.slots.bytes <= self.max_bytes
            return output

        def updated(processor: DiffKVBatchProcessor) -> None:
            update(processor)
            if processor.cache not in self.caches:
                self.caches.append(processor.cache)
            self.steps += 1
            if self.steps % STEPS_BETWEEN_CHECKS == 0:
                check_slots(processor.cache.slots)

        def offloaded(manager: OffloadingManager) -> bool:
            self.preempted += 1
            return offload(manager)

        def cleared(scheduler: Any) -> list[Any]:
            states = clear(scheduler)
            self.cancelled.update(state.status.name for state in states)
            return states

        monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", extended)
        monkeypatch.setattr(ContinuousCache, "attend", attended)
        monkeypatch.setattr(DiffKVBatchProcessor, "update_batch", updated)
        monkeypatch.setattr(OffloadingManager, "offload_requests", offloaded)
        monkeypatch.setattr(Scheduler, "clear_cancelled_requests", cleared)

    def length(self, name: str) -> int:
        """Tokens of the request's prompt."""
        return len(self.prompts[self.prompt[name]])

    def add(self, fate: str, rng: random.Random) -> str:
        name = f"{len(self.fate)}"
        some = fate in ("in the prompt", "spoiled in the prompt")
        self.prompt[name] = len(self.prompts) - 1 - rng.randrange(2) if some else rng.randrange(len(self.prompts))
        self.new[name] = NEW if fate in CANCELLED else 10_000 if fate == "too long" else rng.randint(2, NEW)
        self.fate[name] = fate
        self.manager.add_request(self.prompts[self.prompt[name]], name, max_new_tokens=self.new[name])
        if fate == "waiting":
            self.manager.cancel_request(name)
        return name

    def collect(self, timeout: float) -> None:
        """Takes what has come back."""
        result = self.manager.get_result(timeout=timeout)
        while result is not None:
            assert result.request_id not in self.results
            self.results[result.request_id] = result
            result = self.manager.get_result(timeout=0)

    def outstanding(self) -> int:
        """Requests from which something is to come."""
        return sum(fate not in CANCELLED for fate in self.fate.values()) - len(self.results)

    def wait(self, outstanding: int) -> None:
        for _ in range(600):
            if self.outstanding() <= outstanding:
                return
            assert self.manager.background_thread_status.fatal_error is None
            self.collect(0.2)
        raise AssertionError(f"{self.outstanding()} requests never came back")

    def until_taken(self) -> None:
        """Waits until the engine knows of every request."""
        for _ in range(600):
            if self.manager.input_queue.empty() and self.manager.memory().requests:
                return
            time.sleep(0.01)
        raise AssertionError("the engine takes no requests")

    def run(self, requests: int, seed: int) -> None:
        """Runs `requests` requests, with a few waiting at any time."""
        rng = random.Random(seed)
        fates = [*CANCELLED, *FAILING, *[""] * (100 - len(CANCELLED) - len(FAILING))]
        every = [fates[i % 100 if requests >= 100 else i * 100 // requests] for i in range(requests)]
        rng.shuffle(every)
        for fate in every:
            self.add(fate, rng)
            self.wait(OUTSTANDING)
        self.wait(0)

    def check_answers(self, lossless: bool) -> None:
        """Each request came to its own end and nobody else's."""
        assert set(self.results) == {name for name, fate in self.fate.items() if fate not in CANCELLED}
        for name, result in self.results.items():
            reason = {"": None, "too long": "needs room"}.get(self.fate[name], "NaN")
            assert (result.error is None) == (reason is None)
            if reason is not None:
                assert reason in result.error
                continue
            assert len(result.generated_tokens) == self.new[name]
            if lossless:
                assert result.generated_tokens == self.answer(self.prompt[name])[: self.new[name]]

    def answer(self, prompt: int) -> list[int]:
        if prompt not in self.answers:
            self.answers[prompt] = expected(self.model, self.prompts[prompt], NEW)
        return self.answers[prompt]


@pytest.mark.parametrize(
    ("requests", "config", "max_bytes"),
    [
        pytest.param(60, LOSSLESS, 130_000, id="60-lossless"),
        pytest.param(1000, LOSSLESS, 130_000, id="1000-lossless", marks=pytest.mark.slow),
        pytest.param(200, SEVERAL, 150_000, id="200-several-stores", marks=pytest.mark.slow),
        pytest.param(1000, LOSSY, 90_000, id="1000-lossy", marks=pytest.mark.slow),
    ],
)
def test_requests_come_and_go(
    requests: int, config: DiffKVConfig, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(config, max_bytes, monkeypatch)
    traffic.manager.start()
    traffic.run(requests, seed=0)
    # one stop that ends what is under way, and one that does not
    for hard in (False, True):
        if hard:
            traffic.manager.start()
        rng = random.Random(1)
        names = [traffic.add("", rng) for _ in range(2 * SLOTS)]
        # what has not reached the engine when it is stopped is lost, as in Transformers
        traffic.until_taken()
        traffic.manager.stop(timeout=120, hard_stop=hard)
        assert not traffic.manager.is_running()
        queue = traffic.manager.output_router.output_queue
        results = [queue.get() for _ in range(queue.qsize())]
        traffic.results.update({result.request_id: result for result in results})
        assert set(names) <= set(traffic.results)
        if hard:
            for name in names:
                done = traffic.results.pop(name)
                assert done.error is None or "before this request completed" in done.error
                del traffic.fate[name]
    model = traffic.model
    assert model.config._attn_implementation == "sdpa"
    assert traffic.manager.background_thread_status.fatal_error is None
    traffic.check_answers(lossless=config is not LOSSY)
    assert traffic.steps > STEPS_BETWEEN_CHECKS and traffic.preempted > 0
    assert {"PENDING", "PREFILLING", "DECODING"} <= set(traffic.cancelled), traffic.cancelled
    assert sum(traffic.cancelled.values()) == sum(fate in CANCELLED for fate in traffic.fate.values())
    assert len(traffic.caches) == 2
    for cache in traffic.caches:
        check_empty(cache.slots)
