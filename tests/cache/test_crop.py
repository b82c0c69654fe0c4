"""Taking tokens back: what remains is what the accepted tokens alone would have left behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from runs import (
    CONFIG,
    THRESHOLDS,
    Followed,
    Run,
    assert_close_contents,
    assert_equal_contents,
    captured,
    contents,
    model_of,
    simulation_of,
    started,
    tokens,
)
from tiny_models import ragged_prompts
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.errors import HandOverError
from hf_diffkv.compat import passing
from hf_diffkv.store import rollback

LENGTHS = (90, 33, 1, 64)


@pytest.mark.parametrize("name", [*reversed(THRESHOLDS)])  # a quick run takes gpt_oss, whose sinks require gradients
@pytest.mark.sampled(100)
def test_crop_equals_the_simulation_of_accepted_tokens(name: str) -> None:
    config = DiffKVConfig.paper(**THRESHOLDS[name], window=16, sinks=4)
    with captured() as layers:
        run = started(model_of(name), LENGTHS, config)
        run.cache.activate_past_recording()
        followed = Followed(run, layers, config)
        # tokens in a forward and the number rejected; one accepted token is a generation step
        for seed, (count, rejected) in enumerate([(5, 2), (4, 3), (1, 0), (6, 0), (3, 3), (2, 1), (30, 4), (8, 7)]):
            run.feed(tokens(4, count, seed))
            followed.crop(rejected)
        for seed in range(12):
            run.feed(tokens(4, 3, seed))
            followed.crop(2)
    counts = [int((run.cache.levels(1) == level).sum()) for level in (0, 1, 2, 3)]
    assert min(counts) > 30, f"a level is nearly missing, so little is compared: {counts}"


def test_several_forwards_between_two_crops_are_one_step() -> None:
    """Drafting feeds single tokens, with padding in the middle and at the end, and rejection spanning forwards."""
    with captured() as layers:
        run = started(model_of(), LENGTHS)
        run.cache.activate_past_recording()
        followed = Followed(run, layers, CONFIG)
        for seed, rejected in enumerate((1, 3, 5, 0, 2)):
            run.steps(tokens(4, 4, seed))
            more, mask = ragged_prompts((3, 1, 0, 2), seed=seed)
            run.feed(more, mask)
            followed.crop(rejected)


def test_a_crop_after_every_step_is_generation() -> None:
    model = model_of("gemma2")
    plain, recording = started(model, LENGTHS), started(model, LENGTHS)
    recording.cache.activate_past_recording()
    for seed in range(40):
        expected = plain.feed(tokens(4, 1, seed))
        torch.testing.assert_close(recording.feed(tokens(4, 1, seed)), expected, rtol=1e-6, atol=1e-6)
        recording.crop(0)
    assert_close_contents(recording.cache, plain.cache)


def test_rejected_tokens_leave_no_trace() -> None:
    """Even the pages that are held are the same."""
    run = started(model_of("gpt_oss"), LENGTHS)
    run.steps(tokens(4, 10))
    run.cache.activate_past_recording()
    before, memory, pages = contents(run.cache), run.cache.memory(), run.cache.stores.all[0].pool.capacity
    twin = run.on(copy.deepcopy(run.cache))
    for seed in range(3):
        run.feed(tokens(4, 7, seed))
        run.crop(7)
    assert all(torch.equal(*pair) for pair in zip(before, contents(run.cache)))
    # one bit per column is kept in a buffer that grows ahead of need
    assert replace(run.cache.memory(), compressed_bytes=memory.compressed_bytes) == memory
    assert run.cache.stores.all[0].pool.capacity == pages
    run.cache.check_integrity()
    assert torch.equal(run.feed(tokens(4, 1, 9)), twin.feed(tokens(4, 1, 9)))


def test_crop_zero_keeps_everything() -> None:
    run = started(model_of(), LENGTHS)
    run.cache.crop(0)  # nothing is recorded, nothing happens
    assert_equal_contents(run.cache, started(model_of(), LENGTHS).cache)
    run.cache.activate_past_recording()
    run.feed(tokens(4, 20))
    assert run.cache.memory().tokens["window"] > 0
    run.cache.crop(0)
    other = started(model_of(), LENGTHS)
    other.feed(tokens(4, 20))
    assert_close_contents(run.cache, other.cache)
    run.cache.crop(0)
    assert_close_contents(run.cache, other.cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_crop_zero_without_recording_changes_nothing(name: str) -> None:
    """This also holds if Transformers' sliding-window layers are full, which would refuse it by themselves."""
    run, other = started(model_of(name), LENGTHS), started(model_of(name), LENGTHS)
    run.crop(0)
    assert_equal_contents(run.cache, other.cache)
    assert torch.equal(run.steps(tokens(4, 3)), other.steps(tokens(4, 3)))
    run.crop(0)
    assert torch.equal(run.feed(tokens(4, 7)), other.feed(tokens(4, 7)))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_of_a_cache_that_was_cropped_to_nothing(name: str) -> None:
    """Rows are selected in all layers, including Transformers' own."""
    model = model_of(name)
    cache, ids = DiffKVCache(model), tokens(4, 6)
    model.set_attn_implementation("diffkv")
    with torch.no_grad():
        cache.activate_past_recording()
        model(ids, **passing(cache))
        cache.crop(-6)
        cache.batch_select_indices(torch.tensor([0, 1]))
        cache.stop_recording()
        found = model(ids[:2], **passing(cache)).logits
        expected = model(ids[:2], **passing(DiffKVCache(model))).logits
    torch.testing.assert_close(found, expected)
    assert cache.get_seq_length() == 6


def test_a_full_sliding_window_cannot_be_taken_back() -> None:
    """Without a compressed layer, Transformers' own error is a RuntimeError that names no remedy."""
    model = model_of("gemma2", layer_types=["sliding_attention"] * 2)
    with pytest.warns(UserWarning, match="compresses nothing"):
        run = started(model, LENGTHS)
    with pytest.raises(ValueError, match="activate_past_recording"):
        run.crop(1)
    run.crop(0)
    run.cache.activate_past_recording()
    run.feed(tokens(4, 5))
    run.crop(2)
    expected = started(model, LENGTHS, cache=DynamicCache(config=model.config))
    expected.feed(tokens(4, 5)[:, :3])
    assert torch.equal(run.feed(tokens(4, 1)), expected.feed(tokens(4, 1)))


def test_a_sliding_window_holds_nothing_of_a_prompt_beside_it() -> None:
    """Views of a whole prompt's keys and values would keep them alive, even in copies, without counting in `memory`."""

    def check(cache: DiffKVCache) -> None:
        tensors = [t for layer in cache.layers if hasattr(layer, "sliding_window") for t in vars(layer).values()]
        storages = [t.untyped_storage() for t in tensors if torch.is_tensor(t)]
        # a step leaves the dropped token's storage in place
        token = 2 * 2 * 16 * 8
        assert 0 < sum(storage.nbytes() for storage in storages) <= cache.memory().other_bytes + token

    run = started(model_of("gemma2"), (300,))
    for each in (run.cache, run.cache.fork(1)[0], copy.deepcopy(run.cache)):
        check(each)
    run.cache.activate_past_recording()
    run.feed(tokens(1, 200))
    run.cache.crop(0)
    check(run.cache)


def test_reset_ends_recording_in_every_layer() -> None:
    run = started(model_of("gemma2"), LENGTHS)
    run.cache.activate_past_recording()
    run.cache.reset()
    again = started(run.model, LENGTHS, cache=run.cache)
    again.feed(tokens(4, 30))
    sliding = [layer for layer in again.cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    assert sliding and not any(layer.record_past for layer in sliding) and not again.cache.stores.recording
    assert again.cache.memory().other_bytes == started(run.model, LENGTHS).cache.memory().other_bytes


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_cannot_be_taken_back_raises_and_changes_nothing(name: str) -> None:
    model = model_of(name)
    run = started(model, LENGTHS)
    run.steps(tokens(4, 3))
    twin = run.on(copy.deepcopy(run.cache))
    with pytest.raises(ValueError, match="activate_past_recording"):
        run.cache.crop(-1)
    with pytest.raises(ValueError, match="0 or a negative"):
        run.cache.crop(1)
    assert_equal_contents(run.cache, twin.cache)

    for each in (run, twin):
        each.cache.activate_past_recording()
        each.feed(tokens(4, 5, 2))
    with pytest.raises(ValueError, match="only the last 5"):
        run.cache.crop(-6)
    assert_equal_contents(run.cache, twin.cache)
    for each in (run, twin):
        each.crop(2)
    assert_equal_contents(run.cache, twin.cache)
    with pytest.raises(ValueError, match="only the last 0"):
        run.cache.crop(-1)
    assert torch.equal(run.feed(tokens(4, 3, 3)), twin.feed(tokens(4, 3, 3)))


def test_a_crop_that_does_not_fit_changes_nothing() -> None:
    model = model_of()
    run = Run(model, DiffKVCache(model.config, max_bytes=150_000), 2)
    run.feed(tokens(2, 272))
    run.cache.activate_past_recording()
    run.feed(tokens(2, 3))
    twin = run.on(copy.deepcopy(run.cache))
    for _ in range(2):
        with pytest.raises(MemoryError, match="is full"):
            run.cache.crop(-2)
        run.cache.check_integrity()
        assert run.cache.get_seq_length() == 275
        assert_equal_contents(run.cache, twin.cache)
    for each in (run, twin):
        each.crop(3)
    assert_equal_contents(run.cache, twin.cache)
    assert run.cache.get_seq_length() == 272


@pytest.mark.parametrize("layer", [0, 1])
def test_a_crop_that_fails_in_a_layer(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(model_of(), LENGTHS)
    run.cache.activate_past_recording()
    run.feed(tokens(4, 5))
    twin = run.on(copy.deepcopy(run.cache))
    store, original = run.cache.stores.all[0], rollback._store

    def failing(own: Any, at: int, *args: Any) -> None:
        if own is store and at == layer:
            raise MemoryError
        original(own, at, *args)

    with monkeypatch.context() as patched:
        patched.setattr(rollback, "_store", failing)
        with pytest.raises(MemoryError):
            run.cache.crop(-2)
    if layer == 0:
        for each in (run, twin):
            each.crop(2)
        assert_equal_contents(run.cache, twin.cache)
        return
    cache = run.cache
    for use in (lambda: cache.crop(-1), lambda: cache.levels(0), lambda: cache.dequantize(0)):
        with pytest.raises(HandOverError, match="stopped halfway"):
            use()
    assert cache.memory().bytes > 0
    cache.check_integrity()
    cache.reset()
    assert_equal_contents(started(run.model, LENGTHS, cache=cache).cache, started(run.model, LENGTHS).cache)


def test_recorded_tokens_count_and_show_as_window() -> None:
    run = started(model_of(), LENGTHS)
    run.cache.activate_past_recording()
    before = run.cache.memory()
    run.feed(tokens(4, 6))
    during = run.cache.memory()
    rows = 2 * 4 * 2  # layers, requests, KV heads
    assert during.tokens == {**before.tokens, "window": before.tokens["window"] + 6 * rows}
    # keys, values and the queries of two heads per KV head, in float64
    assert during.bytes - before.bytes >= 6 * rows * (16 + 16 + 2 * 16) * 8
    assert during.dense_bytes - before.dense_bytes == 6 * rows * (16 + 16) * 8
    for layer_idx in (0, 1):
        assert (run.cache.levels(layer_idx)[:, :, -6:] == 3).all()
        assert (run.cache.significance(layer_idx)[:, :, -6:] == 0).all()
    run.crop(6)
    after = run.cache.memory()
    assert replace(after, compressed_bytes=before.compressed_bytes) == before
    assert after.bytes < before.bytes + 4 * 96


@pytest.mark.parametrize("length", [513, 700])
def test_long_prompts_while_recording(length: int) -> None:
    """Only the newest 256 tokens can be taken back; the tokens before them are stored as one forward."""
    with captured() as layers:
        model = model_of()
        run = Run(model, DiffKVCache(model.config, CONFIG), 2)
        run.cache.activate_past_recording()
        run.feed(*ragged_prompts((length, 400)))
        surplus = length - 256
        for index, layer_idx in enumerate(run.cache.compressed_layers()):
            levels = run.cache.levels(layer_idx)
            assert (levels[:, :, surplus:] == 3).all()
            query, key, value, valid, _ = layers[index].part(0, surplus)
            simulation = simulation_of(CONFIG, layers[index])
            simulation.forward(query, key, value, valid=valid, **layers[index].options)
            assert torch.equal(levels[:, :, :surplus], simulation.levels())
        with pytest.raises(ValueError, match="only the last 256"):
            run.cache.crop(-257)
        run.crop(250)
        for index, layer_idx in enumerate(run.cache.compressed_layers()):
            layer = layers[index]
            layer.crop(250)
            simulation = simulation_of(CONFIG, layer)
            for start, stop in ((0, surplus), (surplus, surplus + 6)):
                query, key, value, valid, _ = layer.part(start, stop)
                simulation.forward(query, key, value, valid=valid, **layer.options)
            assert torch.equal(run.cache.levels(layer_idx), simulation.levels())
            torch.testing.assert_close(run.cache.significance(layer_idx), simulation.sums(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(run.cache.dequantize(layer_idx)[0], simulation.stored()[0], rtol=0, atol=0)


def test_rows_chosen_while_recording() -> None:
    """Rows are dropped, duplicated and swapped while some of their tokens may still be rejected."""
    model, index = model_of("gemma2"), [3, 0, 0]
    run = started(model, LENGTHS)
    run.cache.activate_past_recording()
    run.feed(*ragged_prompts((5, 2, 4, 1), seed=3))
    run.select(index)
    run.crop(2)
    ids, mask = run.ids, run.mask

    expected = Run(model, DiffKVCache(model.config, CONFIG), 3)
    expected.feed(ids[:, :90], mask[:, :90])
    expected.feed(ids[:, 90:], mask[:, 90:])
    assert_close_contents(run.cache, expected.cache)
    run.crop(0)
    logits = run.feed(tokens(3, 1, 4))
    run.crop(0)
    torch.testing.assert_close(logits, expected.feed(tokens(3, 1, 4)))
    assert_close_contents(run.cache, expected.cache)
