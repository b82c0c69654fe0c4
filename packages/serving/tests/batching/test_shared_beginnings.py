"""Requests of continuous batching that begin alike: one computes the beginning, the others reuse it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from batching import AMPLE, LOSSLESS, LOSSY, MIXED, check_empty, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.first_tokens import FirstTokens
from hf_diffkv_serving.batching.manager import DiffKVBatchingManager
from hf_diffkv_serving.batching.records import RequestRecord
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, PrefixStore
from hf_diffkv.compat import passing

NEW = 6
UNIFORM = DiffKVConfig(window=16, head_precisions=[["K8V4", "K4V2"], ["K4V2", "K4V2"]], alpha_high=0.0)


class Served:
    """A manager on a model with prefixes kept, and what became of each request.

    Attributes:
        forwards: tokens of each forward of a request, in order. cached: tokens of its prompt that it reused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: DiffKVConfig,
        monkeypatch: pytest.MonkeyPatch,
        max_bytes: int = AMPLE,
        device_bytes: int | None = AMPLE,
        tokens: int = 256,
    ) -> None:
        self.model, self.config = model, config
        self.manager: DiffKVBatchingManager = model.init_continuous_batching(
            request_config(config, max_bytes), chunks(tokens)
        )
        self.store = None
        if device_bytes is not None:
            self.store = PrefixStore(model, config, device_bytes=device_bytes)
            self.manager.use_prefixes(self.store)
        self.forwards: dict[str, list[int]] = defaultdict(list)
        self.cached: dict[str, int] = {}
        self.manager.records.ended = self._note
        extend = ContinuousCache.extend_read_and_write_indices

        def noted(cache: ContinuousCache, name: str, past: int, tokens: int, *indices: Any) -> None:
            if cache is self.manager._cache:
                self.forwards[name].append(tokens)
                self.on_forward(name, past, tokens)
            extend(cache, name, past, tokens, *indices)

        monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", noted)

    def on_forward(self, name: str, past: int, tokens: int) -> None:
        """Called for each request of a forward."""

    def _note(self, record: RequestRecord) -> None:
        self.cached[record.request_id] = record.cached_tokens

    def answers(self, count: int) -> dict[str, list[int]]:
        found = {}
        for _ in range(count):
            result = self.manager.get_result(timeout=120)
            assert result is not None and result.error is None
            found[result.request_id] = result.generated_tokens
        return found

    def stop(self) -> None:
        """Nothing is left."""
        cache = self.manager._cache
        check_empty(cache.slots)
        known = cache.beginnings
        assert not (known._prompts or known._cuts or known._resumed)
        self.manager.stop()


def alone(served: Served, ids: list[int], parts: list[int]) -> list[int]:
    """Returns the answer to a request on a cache of its own, with a prompt in these parts."""
    served.model.set_attn_implementation("diffkv")
    cache, at, said = DiffKVCache(served.model.config, served.config), 0, list(ids)
    for tokens in [*parts, *[1] * (NEW - 1)]:
        with torch.no_grad():
            logits = served.model(torch.tensor([said[at : at + tokens]]), **passing(cache)).logits
        at += tokens
        if at == len(said):
            said.append(int(logits[0, -1].argmax()))
    return said[len(ids) :]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", LOSSY),
        ("llama", replace(LOSSY, alpha_high=0.6, rotate=True, center=True, sinks=4, adaptive_rounding=True)),
        ("gemma3_text", LOSSY),
        ("llama", MIXED),
        ("llama", UNIFORM),
    ],
)
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.sampled(100)
def test_texts_are_those_of_the_same_parts_without_reuse(
    name: str, config: DiffKVConfig, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expects reuse in all but the first request if the beginning is marked, else in all but the first two."""
    served = Served(tiny_model(name, dtype=torch.float64), config, monkeypatch)
    beginning, *questions = prompts((150, 20, 31, 5, 60), seed=3)
    cut = 150 if marked else 144
    served.manager.start()
    said = {}
    for i, question in enumerate(questions):
        marks = [150] if marked else []
        served.manager.add_request(beginning + question, str(i), max_new_tokens=NEW, boundaries=marks)
        said |= served.answers(1)
    served.stop()
    computes = 1 if marked else 2
    for i, question in enumerate(questions):
        ids, first = beginning + question, str(i)
        assert served.cached[first] == (cut if i >= computes else 0)
        whole = [len(ids)] if not marked and i == 0 else [cut, len(ids) - cut]
        assert served.forwards[first][: len(whole)] == (whole if i < computes else whole[1:] + [1])[: len(whole)]
        assert said[first] == alone(served, ids, whole)
    assert served.store.stats.hits["device"] == len(questions) - computes


def test_one_of_those_that_come_together_computes_what_they_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody marks anything; the others wait until it is kept."""
    served = Served(tiny_model("llama"), LOSSLESS, monkeypatch, tokens=64)
    beginning, *questions = prompts((200, 20, 31, 5, 60, 7, 90), seed=4)
    for i, question in enumerate(questions):
        served.manager.add_request(beginning + question, str(i), max_new_tokens=NEW)
    other = prompts((130,), seed=5)[0]
    served.manager.add_request(other, "other", max_new_tokens=NEW)
    served.manager.start()
    said = served.answers(len(questions) + 1)
    served.stop()
    assert served.cached == {"0": 0, "other": 0, **{str(i): 192 for i in range(1, len(questions))}}
    for i, question in enumerate(questions):
        assert said[str(i)] == expected(served.model, beginning + question, NEW)
    assert said["other"] == expected(served.model, other, NEW)


@pytest.mark.parametrize("config", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
@pytest.mark.sampled(100)
def test_texts_go_by_the_parts_of_prompts(config: DiffKVConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts one prompt if a forward has no room for all, and another prompt if beginnings are reused."""
    model = tiny_model("llama", dtype=torch.float64)
    beginning, *questions = prompts((150, 60, 31, 90, 70), seed=3)
    asked = {str(i): beginning + question for i, question in enumerate(questions)}
    runs, said = [], []
    for room in (0, AMPLE):
        served = Served(model, config, monkeypatch, device_bytes=room, tokens=200)
        for name, ids in asked.items():
            served.manager.add_request(ids, name, max_new_tokens=NEW, boundaries=[150])
        served.manager.start()
        said.append(served.answers(len(asked)))
        served.stop()
        runs.append(served)
    parts = [{name: parts_of(served, name, len(ids)) for name, ids in asked.items()} for served in runs]
    assert parts[0] != parts[1]
    if config is LOSSLESS:
        assert said[0] == said[1] == {name: expected(model, ids, NEW) for name, ids in asked.items()}
        return
    assert said[0] != said[1]
    for served, texts, cuts in zip(runs, said, parts):
        assert texts == {name: alone(served, ids, cuts[name]) for name, ids in asked.items()}


def parts_of(served: Served, name: str, tokens: int) -> list[int]:
    """Returns the parts in which a prompt was computed, by this request or the one that left its beginning."""
    reused = served.cached[name]
    found = [reused] if reused else []
    for part in served.forwards[name]:
        if sum(found) < tokens:
            found.append(part)
    return found


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_the_next_one_computes_it_where_the_first_does_not_come_to_it(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tiny_model("llama"), LOSSLESS, monkeypatch, tokens=64)
    beginning, *questions = prompts((200, 20, 31, 5), seed=4)
    attend = ContinuousCache.attend

    def on_forward(name: str, past: int, tokens: int) -> None:
        if name == "0" and past and end == "cancelled":
            served.manager.cancel_request("0")

    def spoiled(cache: ContinuousCache, layer: int, query: Any, key: Any, *rest: Any) -> Any:
        if end == "failed" and layer == 1 and len(served.forwards["0"]) == 2 and "1" not in served.forwards:
            key = torch.full_like(key, torch.inf)
        return attend(cache, layer, query, key, *rest)

    served.on_forward = on_forward
    monkeypatch.setattr(ContinuousCache, "attend", spoiled)
    for i, question in enumerate(questions):
        served.manager.add_request(beginning + question, str(i), max_new_tokens=NEW)
    served.manager.start()
    said = {}
    while len(said) < 2:
        result = served.manager.get_result(timeout=120)
        assert result is not None and (result.error is None or result.request_id == "0")
        if result.error is None:
            said[result.request_id] = result.generated_tokens
    served.stop()
    assert served.cached == {"0": 0, "1": 0, "2": 192}
    for i in (1, 2):
        assert said[str(i)] == expected(served.model, beginning + questions[i], NEW)


@pytest.mark.parametrize("device_bytes", [0, 40_000, None])
def test_without_room_for_beginnings_all_are_computed(
    device_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or those that were used last are kept; and nobody waits for what is not kept."""
    served = Served(tiny_model("llama"), LOSSLESS, monkeypatch, device_bytes=device_bytes, tokens=64)
    first, second, *questions = prompts((100, 120, 20, 31, 5, 60), seed=4)
    asked = [first + questions[0], second + questions[1], first + questions[2], second + questions[3]]
    for i, ids in enumerate(asked):
        served.manager.add_request(ids, str(i), max_new_tokens=NEW, boundaries=[96])
    served.manager.start()
    said = served.answers(4)
    if served.store is not None:
        assert sum(entry.bytes for entry in served.store) <= device_bytes
    served.stop()
    assert set(served.cached.values()) == {0} or device_bytes
    for i, ids in enumerate(asked):
        assert said[str(i)] == expected(served.model, ids, NEW)


def test_requests_that_are_preempted_find_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tiny_model("llama"), LOSSLESS, monkeypatch, max_bytes=220_000, tokens=64)
    preempted = []
    beginning, *questions = prompts((80, 20, 31, 5, 30, 7, 26), seed=4)
    from hf_diffkv_serving.batching.engine import _Admission

    add = _Admission.add_waiting_request

    def added(scheduler: Any, state: Any) -> None:
        if state._true_initial_tokens:
            preempted.append(state.request_id)
        add(scheduler, state)

    monkeypatch.setattr(_Admission, "add_waiting_request", added)
    for i, question in enumerate(questions):
        served.manager.add_request(beginning + question, str(i), max_new_tokens=40)
    served.manager.start()
    said = served.answers(len(questions))
    served.stop()
    assert preempted
    assert [served.cached[str(i)] for i in range(1, len(questions))] == [80] * (len(questions) - 1)
    for i, question in enumerate(questions):
        assert said[str(i)] == expected(served.model, beginning + question, 40)


def test_requests_that_are_preempted_are_cut_where_what_they_began_with_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(tiny_model("llama"), LOSSLESS, monkeypatch, max_bytes=220_000)
    beginning, *questions = prompts((80, 20, 31, 5, 30, 7, 26), seed=4)
    served.store.prefill(torch.tensor([beginning]))
    from hf_diffkv_serving.batching.engine import _Admission

    add, done = _Admission.add_waiting_request, {}

    def added(scheduler: Any, state: Any) -> None:
        if state._true_initial_tokens and not done:
            done[state.request_id] = len(served.forwards[state.request_id])
            served.store.clear()
        add(scheduler, state)

    monkeypatch.setattr(_Admission, "add_waiting_request", added)
    for i, question in enumerate(questions):
        served.manager.add_request(beginning + question, str(i), max_new_tokens=40, boundaries=[80])
    served.manager.start()
    served.answers(len(questions))
    served.stop()
    [(name, before)] = done.items()
    assert served.forwards[name][before] == 80


@pytest.mark.parametrize(("how", "at_once"), [("shared", 5), ("copied", 3), ("taken for alike", 3)])
@pytest.mark.sampled(100)
def test_what_several_begin_with_is_held_once(how: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are there at once for it, each with the text that it has by itself; none is lost that only seems alike."""
    config = replace(UNIFORM, window=8, page_bytes=256)
    served = Served(tiny_model("llama", dtype=torch.float64), config, monkeypatch, max_bytes=120_000)
    beginning, *questions = prompts((150, 20, 31, 5, 26, 12, 9), seed=3)
    others = prompts((170,) * 2, seed=5)
    held, together = [], [0]

    def on_forward(name: str, past: int, tokens: int) -> None:
        cache = served.manager._cache
        owned = [part.store.owned_pages() for part in cache.slots.parts]
        held.append(sum(pages.numel() - pages.unique().numel() for pages in owned))
        together.append(cache.slots.count - cache.slots.idle)

    served.on_forward = on_forward
    if how == "taken for alike":
        # the first one that is there, which is one of the others at first
        def first(known: FirstTokens, ids: torch.Tensor, seen: Any) -> tuple[str | None, int]:
            return next(iter(known._keys), None), ids.numel()

        monkeypatch.setattr(FirstTokens, "alike", first)
    asked = [*others, *(beginning + question for question in questions)]
    for i, ids in enumerate(asked):
        served.manager.add_request(ids, str(i), max_new_tokens=NEW, boundaries=[150] if i >= len(others) else [])
    served.manager.start()
    for part in served.manager._cache.slots.parts:
        part.shares = how != "copied"
    said = served.answers(len(asked))
    served.stop()
    assert max(together) >= at_once and (how != "copied" or max(together) == at_once)
    assert max(held) == 0 if how == "copied" else max(held) >= 100
    for i, ids in enumerate(asked):
        assert said[str(i)] == alone(served, ids, parts_of(served, str(i), len(ids)))


def test_marks_that_are_wrong_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tiny_model("llama"), LOSSLESS, monkeypatch)
    ids = prompts((70,))[0]
    with pytest.raises(ValueError, match="boundaries"):
        served.manager.add_request(ids, "a", boundaries=[70])
    assert served.manager.records.get("a") is None
    served.manager.start()
    name = served.manager.add_request(ids, max_new_tokens=2, boundaries=[65])
    assert list(served.answers(1)) == [name]
    assert served.forwards[name][:2] == [65, 5] and torch.tensor(ids[:65]) in served.store
    served.stop()
