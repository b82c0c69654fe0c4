"""A cache stays precise until `max_bytes` is full, then lowers whole heads, and fails before anything changes."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
from native_code import needs_native
from runs import Run, contents, started, tokens
from tiny_models import ragged_prompts, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import prompt

LENGTHS = (200, 90, 150)
FIELDS = {"window": 16, "page_bytes": 512}
BACKENDS = ["reference", pytest.param("native", marks=needs_native)]


def budget(max_bytes: int | str | None, **fields) -> DiffKVConfig:
    """Rows go from K8V8 directly to K5V4, because the first precision is named."""
    named = {} if max_bytes is None else {"until_full": "K8V8"}
    return DiffKVConfig.preset("balanced", max_bytes=max_bytes, **{**FIELDS, **named, **fields})


def model_in_float32():
    return tiny_model("llama", "diffkv", dtype=torch.float32)


def precise(run: Run) -> int:
    """The number of rows at the precise precision."""
    (store,) = run.cache.stores.all
    return int((~store.low_heads).sum())


def assert_within(run: Run) -> None:
    run.cache.check_integrity()
    assert run.cache.memory().compressed_bytes <= run.cache.config.max_bytes


def stored(cache: DiffKVCache) -> list[torch.Tensor]:
    return [part for layer_idx in cache.compressed_layers() for part in cache.dequantize(layer_idx)]


def assert_same_tokens(actual: DiffKVCache, expected: DiffKVCache) -> None:
    assert all(map(torch.equal, stored(actual), stored(expected)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_and_turns_fill_the_budget_until_all_is_final(backend: str) -> None:
    with use_backend(backend):
        run = started(model_in_float32(), LENGTHS, budget(110_000))
        rungs = [precise(run)]
        with pytest.raises(MemoryError, match="with all tokens at K5V4.*until_full=None"):
            for turn in range(9):
                for seed in range(40):
                    before, seen = contents(run.cache), run.cache.get_seq_length()
                    run.feed(tokens(3, 1, seed))
                    assert_within(run)
                    rungs.append(precise(run))
                before, seen = contents(run.cache), run.cache.get_seq_length()
                run.feed(*ragged_prompts((20 + 30 * turn, 3, 60), seed=turn))
                assert_within(run)
                rungs.append(precise(run))
        assert rungs == sorted(rungs, reverse=True) and len(set(rungs)) > 3 and rungs[0] > 6
        # nothing has changed, and it can continue with more room
        assert run.cache.get_seq_length() == seen and all(map(torch.equal, before, contents(run.cache)))
        memory = run.cache.memory()
        assert memory.compressed_bytes > 0.8 * 110_000 and memory.tokens["pruned"] == 0
        run.cache.config = run.cache.stores.config = run.cache.stores.all[0].config = budget(10**6).of_layer(0)
        run.feed(tokens(3, 1))
        run.cache.check_integrity()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ample_budgets_store_like_the_precise_precision(backend: str) -> None:
    model = model_in_float32()
    with use_backend(backend):
        mine, other = (
            started(model, LENGTHS, config)
            for config in (budget(10**7), budget(None, high="K8V8", low="K8V8", alpha_high=0.0))
        )
        for run in (mine, other):
            run.steps(tokens(3, 12))
            run.feed(*ragged_prompts((20, 3, 60)))
    # outputs of two page formats are summed in parts of different lengths
    for actual, expected in zip(stored(mine.cache), stored(other.cache)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)
    first = [
        run.cache for run in (started(model, LENGTHS, mine.cache.config), started(model, LENGTHS, other.cache.config))
    ]
    assert_same_tokens(*first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_that_just_fit_are_stored_like_the_final_preset(backend: str) -> None:
    """Nothing is quantised twice: the first prompt is stored bit for bit as with the preset."""
    model = model_in_float32()
    with use_backend(backend):
        final = started(model, LENGTHS, budget(None))
        least = final.cache.memory().compressed_bytes
        for max_bytes in range(least, 2 * least, 1000):
            try:
                mine = started(model, LENGTHS, budget(max_bytes))
            except MemoryError:
                continue
            break
        assert precise(mine) == 0 and mine.cache.memory().lowered == 0
        assert_same_tokens(mine.cache, final.cache)
        assert_within(mine)


def test_prompts_between_lower_some_rows_and_quantise_nothing_twice() -> None:
    model = model_in_float32()
    mine, high, low = (
        started(model, LENGTHS, config)
        for config in (budget(95_000), budget(None, high="K8V8", low="K8V8", alpha_high=0.0), budget(None))
    )
    (store,) = mine.cache.stores.all
    assert 0 < precise(mine) < store.low_heads.numel() and mine.cache.memory().lowered == 0
    # the first layer sees the same keys in all of them
    for got, precise_one, final in zip(*(run.cache.dequantize(0) for run in (mine, high, low))):
        for request in range(3):
            for head in range(2):
                wanted = final if store.low_heads[0, request, head] else precise_one
                assert torch.equal(got[request, head], wanted[request, head])


def test_what_is_full_and_what_is_final_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        run = started(model_in_float32(), LENGTHS, budget(110_000))
        with pytest.raises(MemoryError):
            run.steps(tokens(3, 900))
    full, final = [record.getMessage() for record in caplog.records]
    assert full == (
        "max_bytes=110000 is full: from now on, heads are lowered from K8V8 to K5V4, the least harmful first."
    )
    assert final.startswith("everything is at K5V4, with room for about ")


def test_today_s_rule_is_there_for_those_who_ask() -> None:
    with pytest.warns(UserWarning, match="least significant tokens"):
        run = started(model_in_float32(), LENGTHS, budget(90_000, until_full=None))
        run.steps(tokens(3, 40))
    assert run.cache.memory().tokens["pruned"] > 0 and run.cache.memory().until_full is None


@pytest.mark.parametrize("repeats", [2, 3])
def test_copies_of_requests_lower_rows_or_are_refused(repeats: int) -> None:
    run = started(model_in_float32(), LENGTHS, budget(170_000))
    before, lowered = contents(run.cache), 12 - precise(run)
    try:
        run.cache.batch_repeat_interleave(repeats)
        assert precise(run) < repeats * (12 - lowered)
        run.ids, run.mask = (part.repeat_interleave(repeats, 0) for part in (run.ids, run.mask))
    except MemoryError:
        assert repeats == 3 and all(map(torch.equal, before, contents(run.cache)))
    assert_within(run)
    run.feed(tokens(run.cache.batch_size, 1))
    assert_within(run)


def test_beams_stay_within_the_budget() -> None:
    cache = DiffKVCache(model_in_float32().config, budget(200_000))
    ids, mask = ragged_prompts(LENGTHS)
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": 2}
    model_in_float32().generate(ids, attention_mask=mask, **passing(cache), **options)
    cache.check_integrity()
    assert cache.memory().bytes <= 200_000 and cache.memory().lowered > 0


def test_forks_lower_on_their_own() -> None:
    run = started(model_in_float32(), LENGTHS, budget(130_000))
    before, rungs, lowered = contents(run.cache), precise(run), run.cache.memory().lowered
    other = run.on(run.cache.fork(1)[0])
    other.steps(tokens(3, 60))
    assert_within(other)
    assert precise(other) < rungs == precise(run)
    assert other.cache.memory().lowered > lowered == run.cache.memory().lowered
    assert all(map(torch.equal, before, contents(run.cache)))
    assert_within(run)
    twin = run.on(copy.deepcopy(run.cache))
    assert torch.equal(run.steps(tokens(3, 60)), twin.steps(tokens(3, 60)))
    assert_same_tokens(run.cache, other.cache)


def test_saved_caches_go_on_where_they_were(tmp_path) -> None:
    model = model_in_float32()
    run = started(model, LENGTHS, budget(100_000))
    run.steps(tokens(3, 10))
    assert 0 < precise(run) < 12
    run.cache.save_pretrained(tmp_path)
    other = run.on(DiffKVCache.from_pretrained(tmp_path, model))
    assert_same_tokens(other.cache, run.cache)
    assert (precise(other), other.cache.memory().lowered) == (precise(run), run.cache.memory().lowered)
    # with these, keys are rounded when they are lowered
    queries, loaded = (each.cache.stores.all[0].lowering.moments for each in (run, other))
    assert torch.equal(loaded, queries) and queries.any()
    other.steps(tokens(3, 30, 2))
    assert_within(other)
    assert precise(other) < precise(run)


def test_recorded_tokens_make_rows_give_way() -> None:
    run = started(model_in_float32(), LENGTHS, budget(156_000))
    run.cache.activate_past_recording()
    for seed in range(30):
        run.feed(tokens(3, 8, seed))
        assert_within(run)
        run.crop(seed % 8)
        assert_within(run)
    assert 0 < precise(run) < 12


def test_a_budget_may_be_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_diffkv.cache.free_memory.free_bytes", lambda device: 200_000)
    run = started(model_in_float32(), LENGTHS, budget(" 50 %"))
    assert run.cache.config.max_bytes == "50%" and run.cache.memory().max_bytes == 100_000
    assert run.cache.memory().compressed_bytes <= 100_000
    memory = run.cache.memory()
    assert 0.5 < memory.filled < 1 and memory.until_full == "K8V8" and 0 < memory.room < 100
    assert "of max_bytes in use, room for about" in str(memory)
    named = {name for layer in memory.layers for name in layer.precisions}
    assert named <= {"K8V8", "K5V4", "K8V8/K5V4"} and len(named) > 1
    for wrong in ("0%", "101%"):
        with pytest.raises(ValueError, match=f"max_bytes='{wrong}' is not a share"):
            budget(wrong)


def test_moments_of_queries_that_take_the_room_are_named() -> None:
    """They use as much as a thousand tokens with such small heads, and a smaller window would not help."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, **heads))
    ids = torch.arange(200)[None] % 64
    moments = 2 * 2 * 128 * 128 * 4
    said = rf"windows and tables, and the moments of queries \({moments} bytes\),.* or give adaptive_rounding=False"
    with pytest.raises(MemoryError, match=said):
        model.generate(ids, cache=DiffKVCache(model, max_bytes=300_000), max_new_tokens=2)
    without = DiffKVCache(model, max_bytes=300_000, adaptive_rounding=False)
    assert model.generate(ids, cache=without, max_new_tokens=2).shape[1] == 202
    with pytest.raises(MemoryError, match="hold this cache's windows and tables.*lower window, sinks"):
        model.generate(ids, cache=DiffKVCache(model, max_bytes=100_000), max_new_tokens=2)


def test_heads_that_lose_least_are_lowered_first() -> None:
    """Among rows of equal length, the measured losses alone decide."""
    cache = DiffKVCache(model_in_float32().config, budget(100_000))
    harm = [[3.0, 1.0], [4.0, 2.0]]
    cache.stores.harm = lambda precise, final: tuple(map(tuple, harm))
    run = started(model_in_float32(), (150, 150, 150), cache=cache)
    (store,) = cache.stores.all
    seen = []
    while not store.low_heads.all():
        low = store.low_heads
        seen.append((low.sum().item(), max((harm[at][head] for at, _, head in low.nonzero().tolist()), default=0.0)))
        least_left = min(harm[at][head] for at, _, head in (~low).nonzero().tolist())
        assert seen[-1][1] <= least_left
        run.feed(tokens(3, 1))
    assert len({count for count, _ in seen}) > 1


@pytest.mark.parametrize("preset", ["quality", "small"])
def test_the_bytes_that_errors_name_suffice(preset: str) -> None:
    model, ids = model_in_float32(), tokens(1, 400, seed=0)

    def refused(max_bytes: int) -> str:
        cache = DiffKVCache(model.config, DiffKVConfig.preset(preset, max_bytes=max_bytes, page_bytes=512))
        with pytest.raises(MemoryError) as error, torch.no_grad():
            model(ids, **passing(cache))
            raise MemoryError("fits")
        return str(error.value)

    def named(pattern: str, text: str) -> int:
        return int(re.search(pattern, text)[1])

    budget = 1000
    while "cannot even hold" in (text := refused(budget)):
        least = named(r"page of tokens \((\d+) bytes\)", text)
        assert least > budget
        budget = least
    more = named(r"(\d+) more bytes are needed", text)
    # tables that depend on the budget may add a few bytes
    assert refused(budget + more + 64) == "fits"
    assert "more bytes are needed" in refused(budget + more - 64)


def test_queries_of_a_prompt_that_is_tried_again_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_in_float32(), tokens(1, 60, seed=0)
    caches = [DiffKVCache(model.config, budget("1GB")) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :40], **passing(cache))
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(prompt, "rewrite_rows", refuse)
            model(ids[:, 40:], **passing(caches[0]))
        assert caches[0].get_seq_length() == 40
        for cache in caches:
            model(ids[:, 40:], **passing(cache))
    one, two = (cache.stores.all[0].lowering.moments for cache in caches)
    assert torch.equal(one, two) and one.any()


def refuse(*args: object) -> None:
    raise MemoryError
