"""Continuous batching with the compressed cache: every request is what it would be by itself."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from batching import (
    LOSSLESS,
    LOSSY,
    MIXED,
    NEW,
    SEVERAL,
    TIGHT,
    check_empty,
    chunks,
    expected,
    levels_of,
    prompts,
    request_config,
)
from hf_diffkv_serving.batching import manager as continuous
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.manager import DiffKVBatchingManager
from tiny_models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

CROWD = (70, 60, 75, 50)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


class Watch:
    """Records each request's forwards, its tokens at its end, and the most bytes held at any layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards: dict[str, list[int]] = defaultdict(list)
        self.levels: dict[str, list[torch.Tensor]] = {}
        self.bytes, self.requests, self.preempted, self.caches = [], 0, 0, []
        original = {name: getattr(ContinuousCache, name) for name in ("attend", "free_blocks")}
        extend = ContinuousCache.extend_read_and_write_indices

        def watched_extend(cache: ContinuousCache, request_id: str, past: int, tokens: int, *indices: Any) -> None:
            if past == 0:
                self.forwards[request_id].clear()
            self.forwards[request_id].append(tokens)
            extend(cache, request_id, past, tokens, *indices)

        def watched_attend(cache: ContinuousCache, layer: int, *args: Any, **kwargs: Any) -> Any:
            output = original["attend"](cache, layer, *args, **kwargs)
            self.bytes.append(cache.bytes)
            self.requests = max(self.requests, cache.memory().requests)
            return output

        def watched_free(cache: ContinuousCache, request_id: str, no_cache: bool = False) -> None:
            if cache not in self.caches:
                self.caches.append(cache)
            slot = cache._slot_of.get(request_id)
            self.preempted += no_cache and slot is not None
            if slot is not None and cache.slots.seen(slot):
                self.levels[request_id] = levels_of(cache.slots, slot)
            original["free_blocks"](cache, request_id, no_cache)

        monkeypatch.setattr(ContinuousCache, "attend", watched_attend)
        monkeypatch.setattr(ContinuousCache, "free_blocks", watched_free)
        monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", watched_extend)

    def assert_nothing_left(self) -> None:
        for cache in self.caches:
            check_empty(cache.slots)
            assert cache.sliding is None or not cache.sliding.requests


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


# a window of 24 tokens in every other layer
SLIDING = ["gemma3_text", "gemma2", "gpt_oss"]
# these have no other attention of Transformers' own on a CPU
EAGER = {"gemma2": "eager", "gpt_oss": "eager"}


@pytest.mark.parametrize("name", ["llama", "qwen3", "granite", "mixtral", *SLIDING])
@pytest.mark.sampled(100)
def test_lossless_equals_generate(name: str, watch: Watch) -> None:
    """Prompts in chunks of 64, mixed with generated tokens."""
    model = tiny_model(name, EAGER.get(name, "sdpa"))
    given = prompts()
    want = [expected(model, ids) for ids in given]
    outputs = model.generate_batch(given, request_config(LOSSLESS), chunks())
    assert [output.generated_tokens for output in outputs.values()] == want
    assert model.config._attn_implementation == EAGER.get(name, "sdpa")
    mixed = [forwards for forwards in watch.forwards.values() if len([n for n in forwards if n > 1]) > 1]
    assert mixed and watch.requests > 2
    watch.assert_nothing_left()


HEADS = [["K8V4", "K4V2"], ["K8V8", "K8V8"], None]


@pytest.mark.parametrize(
    ("name", "layers", "options"),
    [
        ("llama", 2, {}),
        ("llama", 3, {}),
        ("gemma3_text", 3, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ],
)
@pytest.mark.sampled(4)
def test_texts_of_several_stores_are_those_of_generate(name: str, layers: int, options: dict, watch: Watch) -> None:
    """Compares with `generate()` at the same precisions, with prompts that are not cut into parts."""
    model = tiny_model(name, dtype=torch.float64, num_hidden_layers=layers, **options)
    compressed = layers - ("layer_types" in options)
    config, max_bytes = replace(LOSSY, head_precisions=HEADS[:compressed]), 500_000
    given = prompts((5, 90, 1, 40, 130))
    model.set_attn_implementation("diffkv")
    want = [expected(model, ids, **passing(DiffKVCache(model.config, config))) for ids in given]
    model.set_attn_implementation("sdpa")
    outputs = model.generate_batch(given, request_config(config, max_bytes), chunks(512))
    assert [output.generated_tokens for output in outputs.values()] == want
    assert {len(cache.slots.parts) for cache in watch.caches} == {compressed}
    assert watch.requests > 2 and max(watch.bytes) <= max_bytes
    watch.assert_nothing_left()


@pytest.mark.parametrize(("name", "lossless"), [("llama", LOSSLESS), ("gemma3_text", LOSSLESS), ("llama", SEVERAL)])
@pytest.mark.sampled(100)
def test_preempted_requests_are_computed_anew(name: str, lossless: DiffKVConfig, watch: Watch) -> None:
    model = tiny_model(name)
    given = prompts(CROWD)
    want = [expected(model, ids, 32) for ids in given]
    config = request_config(lossless, TIGHT, max_new_tokens=32)
    outputs = model.generate_batch(given, config, chunks(safety_margin=0.0))
    assert [output.generated_tokens for output in outputs.values()] == want
    assert watch.preempted > 0
    assert TIGHT // 2 < max(watch.bytes) <= TIGHT
    watch.assert_nothing_left()


def starve_once(monkeypatch: pytest.MonkeyPatch, request_id: str, generated: int) -> None:
    """Makes the cache deny memory to one request after `generated` tokens, so that it is preempted."""
    denied: list[bool] = []
    can_store, storable = ContinuousCache.can_store_request_tokens, ContinuousCache.count_storable_requests

    def deny(cache: ContinuousCache, state: Any, tokens: int, dry_run: bool = False) -> bool:
        if not denied and state.request_id == request_id and state.generated_len() == generated:
            denied.append(True)
            return False
        return can_store(cache, state, tokens, dry_run)

    def none_fits(cache: ContinuousCache, needed: list[dict[str, int]]) -> int:
        return 0 if denied and denied.pop() and not denied.append(False) else storable(cache, needed)

    monkeypatch.setattr(ContinuousCache, "can_store_request_tokens", deny)
    monkeypatch.setattr(ContinuousCache, "count_storable_requests", none_fits)


@pytest.mark.parametrize(
    ("name", "config", "preempted"),
    [
        ("llama", LOSSY, False),
        ("llama", LOSSY, True),
        ("llama", MIXED, True),
        *((name, LOSSY, True) for name in SLIDING),
    ],
)
@pytest.mark.sampled(4)
def test_lossy_requests_are_what_they_are_alone(
    name: str, config: DiffKVConfig, preempted: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares tokens, levels and text with the same forwards on a `DiffKVCache` of the request's own."""
    model = tiny_model(name, EAGER.get(name, "sdpa"), dtype=torch.float64)
    given, max_bytes = prompts((5, 90, 1, 40, 130)), 300_000
    if preempted:
        starve_once(monkeypatch, "req_1", 4)
    outputs = model.generate_batch(given, request_config(config, max_bytes), chunks())
    assert max(watch.bytes) <= max_bytes
    assert watch.preempted == preempted
    pruned = compared = 0
    for ids, (request_id, output) in zip(given, outputs.items()):
        text, forwards = ids + output.generated_tokens, watch.forwards[request_id]
        assert sum(forwards) == len(text) - 1
        cache, at = DiffKVCache(model.config, config), 0
        model.set_attn_implementation("diffkv")
        # before it there may be parts of the prompt, and of what was said before a preemption
        prompt_end = max((i for i, tokens in enumerate(forwards) if tokens > 1), default=0)
        for index, tokens in enumerate(forwards):
            with torch.no_grad():
                logits = model(torch.tensor([text[at : at + tokens]]), **passing(cache)).logits
            at += tokens
            if at >= len(ids) and index >= prompt_end:
                assert int(logits[0, -1].argmax()) == text[at]
                compared += 1
        for layer, mine in zip(cache.compressed_layers(), watch.levels[request_id], strict=True):
            assert torch.equal(mine, cache.levels(layer))
            pruned += int((mine < 1).sum())
        model.set_attn_implementation(EAGER.get(name, "sdpa"))
    assert pruned > 0
    # what one request had said before its preemption is not predicted again
    assert compared == len(given) * NEW - (4 if preempted else 0)
    watch.assert_nothing_left()


def collect(manager: DiffKVBatchingManager, wanted: set[str], patience: int = 60) -> dict[str, Any]:
    """The final output of each request."""
    done: dict[str, Any] = {}
    for _ in range(patience):
        if wanted <= set(done):
            break
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            done[result.request_id] = result
    assert wanted <= set(done), wanted - set(done)
    return done


def serve(model: PreTrainedModel, config: GenerationConfig, **options: Any) -> DiffKVBatchingManager:
    manager = model.init_continuous_batching(config, chunks(**options))
    assert isinstance(manager, DiffKVBatchingManager)
    manager.start()
    return manager


def test_cancelled_requests_leave_nothing(model: PreTrainedModel, watch: Watch) -> None:
    """Requests are cancelled at random moments while others arrive; those that stay end as they should."""
    rng = random.Random(0)
    given = prompts(tuple(rng.randint(1, 120) for _ in range(40)))
    manager = serve(model, request_config(LOSSLESS, TIGHT), max_requests_per_batch=4)
    cancelled, names = set(), []
    for ids in given:
        names.append(manager.add_request(ids, max_new_tokens=rng.randint(1, 8)))
        if rng.random() < 0.2:
            cancelled.add(rng.choice(names))
            manager.cancel_request(sorted(cancelled)[-1])
    done = collect(manager, set(names) - cancelled)
    manager.stop()
    assert not manager.is_running() and model.config._attn_implementation == "sdpa"
    for name, ids in zip(names, given):
        if name not in cancelled:
            assert done[name].generated_tokens == expected(model, ids, len(done[name].generated_tokens))
    assert max(watch.bytes) <= TIGHT
    watch.assert_nothing_left()


def test_streaming_gives_every_token_and_stops(model: PreTrainedModel) -> None:
    ids = prompts((30,))[0]
    want = expected(model, ids, 8)
    stop = want[4]
    manager = serve(model, request_config(LOSSLESS))
    name = manager.add_request(ids, max_new_tokens=8, streaming=True, eos_token_id=stop)
    lengths = [len(result.generated_tokens) for result in manager.request_id_iter(name)]
    manager.stop()
    end = want.index(stop) + 1
    assert lengths == list(range(1, end + 1))


def test_what_never_fits_is_refused_alone(model: PreTrainedModel, watch: Watch) -> None:
    """Refuses the request and all forks of it."""
    given = prompts((20, 4000)) + [[]]
    config = request_config(LOSSLESS, TIGHT, num_return_sequences=2, do_sample=True, top_k=1)
    outputs = list(model.generate_batch(given, config, chunks()).values())
    assert [output.generated_tokens for output in outputs] == 2 * [expected(model, given[0])] + 4 * [[]]
    assert all("max_bytes" in output.error and "4000 prompt tokens" in output.error for output in outputs[2:4])
    assert all("prompt is empty" in output.error for output in outputs[4:])
    watch.assert_nothing_left()


def test_wrong_requests_are_refused_alone(model: PreTrainedModel, watch: Watch) -> None:
    manager = serve(model, request_config(LOSSLESS))
    vocabulary = model.config.vocab_size
    (right,) = prompts((20,))
    asked = {"low": ([3, -1], 5), "high": ([3, vocabulary], 5), "none": (right, 0), "right": (right, 7)}
    asked |= {"text": ("Hello", 5), "nested": ([right], 5), "tensor": (torch.tensor([right]), 5)}
    asked |= {"none of it": ([3, None], 5), "floats": ([3.5, 4.0], 5), "half": (right, 2.5)}
    for name, (ids, new) in asked.items():
        manager.add_request(ids, request_id=name, max_new_tokens=new)
    results = [manager.get_result(timeout=60) for _ in asked]
    manager.stop()
    found = {result.request_id: result for result in results}
    assert "token ids [-1]" in found["low"].error and f"token ids [{vocabulary}]" in found["high"].error
    assert f"0 to {vocabulary - 1}" in found["high"].error and "max_new_tokens=0" in found["none"].error
    assert "max_new_tokens=2.5 must be a whole number" in found["half"].error
    assert "holds 'H' where token ids are expected" in found["text"].error and "tokenise" in found["nested"].error
    assert all("where token ids are expected" in found[name].error for name in ("tensor", "none of it", "floats"))
    assert all(found[name].generated_tokens == [] for name in asked if name != "right")
    assert found["right"].generated_tokens == expected(model, right, 7)
    watch.assert_nothing_left()


def test_a_name_that_is_taken_is_refused(model: PreTrainedModel, watch: Watch) -> None:
    manager = serve(model, request_config(LOSSLESS))
    first, second = prompts((20, 9))
    for ids in (first, second):
        manager.add_request(ids, request_id="same", max_new_tokens=20)
    results = [manager.get_result(timeout=60) for _ in range(2)]
    manager.stop()
    assert "request_id='same'" in results[0].error
    assert results[1].generated_tokens == expected(model, first, 20)
    watch.assert_nothing_left()


def test_a_request_that_fails_fails_alone(
    model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are not finite come in one request's prompt, and in another one's fourth generated token."""
    attend = ContinuousCache.attend

    def spoiled(cache: ContinuousCache, layer: int, query: Any, key: Any, value: Any, *options: Any) -> Any:
        if layer == 1:
            at = 0
            for name, forwards in packed(cache):
                if (name, len(forwards)) in (("req_1", 1), ("req_2", 6)):
                    key = key.clone()
                    key[:, :, at] = torch.inf
                at += forwards[-1]
        return attend(cache, layer, query, key, value, *options)

    order: list[str] = []

    def packed(cache: ContinuousCache) -> list[tuple[str, list[int]]]:
        return [(name, watch.forwards[name]) for name in order]

    extend = ContinuousCache.extend_read_and_write_indices

    def noted(cache: ContinuousCache, request_id: str, *args: Any) -> None:
        if not cache._coming:
            order.clear()
        order.append(request_id)
        extend(cache, request_id, *args)

    monkeypatch.setattr(ContinuousCache, "attend", spoiled)
    monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", noted)
    given = prompts((100, 80, 70, 33))
    outputs = list(model.generate_batch(given, request_config(LOSSY), chunks()).values())
    assert [bool(output.error) for output in outputs] == [False, True, True, False]
    assert all("NaN" in outputs[i].error for i in (1, 2))
    assert len(outputs[1].generated_tokens) == 0 and 0 < len(outputs[2].generated_tokens) < NEW
    alone = model.generate_batch([given[3]], request_config(LOSSY), chunks())
    assert outputs[3].generated_tokens == next(iter(alone.values())).generated_tokens
    watch.assert_nothing_left()


@pytest.mark.parametrize(("name", "lossless"), [("llama", LOSSLESS), ("gemma3_text", LOSSLESS), ("llama", SEVERAL)])
@pytest.mark.sampled(100)
def test_forks_share_a_prompt_and_go_their_own_way(name: str, lossless: DiffKVConfig, watch: Watch) -> None:
    model = tiny_model(name)
    given = prompts((50, 9, 1))
    config = request_config(lossless, num_return_sequences=3, do_sample=True, top_k=1)
    outputs = model.generate_batch(given, config, chunks(max_requests_per_batch=16))
    assert len(outputs) == 9
    for index, output in enumerate(outputs.values()):
        assert output.generated_tokens == expected(model, given[index // 3])
    assert sum(n for forwards in watch.forwards.values() for n in forwards if n > 1) == 49 + 8
    watch.assert_nothing_left()


def test_forks_without_room_are_computed_anew(model: PreTrainedModel, watch: Watch) -> None:
    given = prompts((40, 9))
    config = request_config(LOSSLESS, num_return_sequences=3, do_sample=True, top_k=1)
    outputs = model.generate_batch(given, config, chunks(max_requests_per_batch=2))
    for index, output in enumerate(outputs.values()):
        assert output.generated_tokens == expected(model, given[index // 3])
    watch.assert_nothing_left()


def test_without_a_limit_a_request_goes_on_as_long_as_there_is_room(model: PreTrainedModel) -> None:
    manager = serve(model, request_config(LOSSLESS, TIGHT, max_new_tokens=None))
    longest = manager.memory().longest
    name = manager.add_request(prompts((20,))[0])
    done = collect(manager, {name})
    manager.stop()
    assert len(done[name].generated_tokens) == longest + 1 - 20


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.sampled(100)
def test_stopping_ends(model: PreTrainedModel, hard: bool, watch: Watch) -> None:
    """A flush ends what was asked for, even where requests were preempted and those before them cancelled."""
    manager = serve(model, request_config(LOSSLESS, TIGHT), safety_margin=0.0)
    names = [manager.add_request(ids, max_new_tokens=80) for ids in prompts(CROWD)]
    for _ in range(600):
        if watch.preempted:
            break
        manager.get_result(timeout=0.05)
    assert watch.preempted
    manager.cancel_request(names[0])
    manager.stop(timeout=120, hard_stop=hard)
    assert not manager.is_running()
    assert model.config._attn_implementation == "sdpa"
    watch.assert_nothing_left()


def test_a_manager_is_used_again(model: PreTrainedModel) -> None:
    given = prompts((20, 9))
    want = [expected(model, ids) for ids in given]
    config = request_config(LOSSLESS)
    for _ in range(2):
        outputs = model.generate_batch(given, config, chunks(), persistent_manager=True)
        assert [output.generated_tokens for output in outputs.values()] == want
        assert model.config._attn_implementation == "sdpa"
    manager = model._cached_continuous_batching_manager
    assert manager.memory().requests == 0
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_manager_made_in_inference_mode_is_used_outside_too(name: str) -> None:
    model = tiny_model(name)
    (ids,) = prompts((60,))
    want = expected(model, ids)
    with torch.inference_mode():
        manager = serve(model, request_config(LOSSLESS))
    for _ in range(2):
        assert collect(manager, {manager.add_request(ids)}).popitem()[1].generated_tokens == want
        manager.stop()
        manager.start()
    manager.stop()


def test_a_share_of_free_memory_is_the_budget(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "free_bytes", lambda device: 2_000_000)
    config = request_config(LOSSLESS, None)
    manager = model.init_continuous_batching(config, chunks(max_memory_percent=0.25))
    assert manager.memory().max_bytes == 500_000
    assert manager.memory().held_bytes <= 500_000
    manager.stop()
    assert model.config._attn_implementation == "sdpa"


def test_the_model_cannot_be_used_otherwise_meanwhile(model: PreTrainedModel) -> None:
    manager = serve(model, request_config(LOSSY))
    with pytest.raises(RuntimeError, match="got no cache from the engine"):
        model(torch.tensor([[1, 2, 3]]))
    manager.stop()


def test_without_the_name_the_engine_is_untouched(model: PreTrainedModel) -> None:
    ids = prompts((20,))[0]
    outputs = model.generate_batch([ids], GenerationConfig(max_new_tokens=4, do_sample=False), chunks(num_blocks=8))
    assert next(iter(outputs.values())).generated_tokens == expected(model, ids, 4)
    assert not isinstance(model.init_continuous_batching(GenerationConfig()), DiffKVBatchingManager)
