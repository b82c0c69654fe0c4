"""Copies and forks of a prefix, and long conversations."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from runs import (
    CONFIG,
    Followed,
    Run,
    assert_close_contents,
    assert_equal_contents,
    captured,
    contents,
    model_of,
    started,
    tokens,
)
from tiny_models import ragged_prompts, tiny_model

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.store import Store

LENGTHS = (90, 33, 1, 64)


def deep_copies(cache: DiffKVCache, n: int) -> list[DiffKVCache]:
    return [copy.deepcopy(cache) for _ in range(n)]


def store_of(cache: DiffKVCache) -> Store:
    return cache.stores.all[0]


@pytest.mark.parametrize("duplicate", [deep_copies, DiffKVCache.fork], ids=["deepcopy", "fork"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_a_reused_prefix_equals_independent_runs(name: str, duplicate: Callable) -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)
    model = model_of(name)

    def prefix() -> Run:
        run = started(model, LENGTHS, config)
        run.steps(tokens(4, 11))
        return run

    shared = prefix()
    before = contents(shared.cache)
    runs = [shared.on(cache) for cache in duplicate(shared.cache, 3)]
    independent = [prefix() for _ in runs]
    for turn in range(3):  # in turns, so that the copies diverge side by side
        for number, (run, alone) in enumerate(zip(runs, independent)):
            more, mask = ragged_prompts((3, 7, 0, 12), seed=10 * number + turn)
            assert torch.equal(run.feed(more, mask), alone.feed(more, mask))
            ids = tokens(4, 4, seed=10 * number + turn)
            for step in ids.split(1, dim=1):
                assert torch.equal(run.feed(step), alone.feed(step))
                for each in (*runs, shared):
                    each.cache.check_integrity()
    for run, alone in zip(runs, independent):
        assert_equal_contents(run.cache, alone.cache)
    assert all(torch.equal(*pair) for pair in zip(before, contents(shared.cache))), "the prefix changed"
    original = prefix()
    assert torch.equal(shared.steps(tokens(4, 5, 99)), original.steps(tokens(4, 5, 99)))
    assert_equal_contents(shared.cache, original.cache)


def test_forks_may_be_cropped_selected_and_forked_again() -> None:
    model = model_of()
    shared = started(model, LENGTHS)
    first, second, third = (shared.on(cache) for cache in shared.cache.fork(3))
    second.select([2, 0])
    third.cache.activate_past_recording()
    third.feed(tokens(4, 5))
    third.crop(3)
    nested = [first.on(cache) for cache in first.cache.fork(2)]
    for seed, run in enumerate(nested):
        run.steps(tokens(4, 9, seed))
        for each in (shared, first, second, third, *nested):
            each.cache.check_integrity()

    assert_equal_contents(shared.cache, started(model, LENGTHS).cache)
    assert_equal_contents(first.cache, shared.cache)
    chosen = started(model, LENGTHS)
    chosen.select([2, 0])
    assert_equal_contents(second.cache, chosen.cache)
    cropped = started(model, LENGTHS)
    cropped.feed(tokens(4, 2 + 3)[:, :2])
    assert_close_contents(third.cache, cropped.cache)
    for seed, run in enumerate(nested):
        alone = started(model, LENGTHS)
        alone.steps(tokens(4, 9, seed))
        assert_equal_contents(run.cache, alone.cache)


def test_a_cache_with_tokens_to_take_back_is_not_forked() -> None:
    run = started(model_of(), LENGTHS)
    run.cache.activate_past_recording()
    run.feed(tokens(4, 2))
    with pytest.raises(ValueError, match=r"crop\(0\)"):
        run.cache.fork(2)
    with pytest.raises(ValueError, match="at least 1"):
        run.cache.fork(0)
    run.crop(0)
    assert_equal_contents(run.cache.fork(1)[0], run.cache)


def test_eight_forks_of_a_long_prefix_share_its_memory() -> None:
    model = tiny_model("llama", "diffkv", max_position_embeddings=8192)
    run = started(model, (4096,), DiffKVConfig(alpha_high=1.0, alpha_low=0.5))
    alone = run.cache.memory().bytes
    assert alone > 4096 * 50  # most of it is tokens
    forks = run.cache.fork(8)
    held = sum(cache.memory().bytes for cache in (run.cache, *forks))
    assert held - alone < 0.1 * alone, (held, alone)
    pool = store_of(run.cache).pool
    assert all(store_of(fork).pool is pool for fork in forks)
    assert pool.bytes < alone, "the pool of all nine is no larger than the prefix"

    # the first forward of a fork copies what it shares
    run.on(forks[0]).feed(tokens(1, 1))
    diverged = sum(cache.memory().bytes for cache in (run.cache, *forks))
    assert diverged - alone > 0.8 * alone


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """Turns off the garbage collector, so that dropped objects must be freed without it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_a_dropped_cache_frees_its_memory_at_once(name: str) -> None:
    run = started(model_of(name), LENGTHS)
    run.steps(tokens(4, 3))
    gone = [weakref.ref(run.cache), weakref.ref(store_of(run.cache)), weakref.ref(store_of(run.cache).pool)]
    del run
    assert [ref() for ref in gone] == [None] * 3


@pytest.mark.usefixtures("no_garbage_collector")
def test_pages_count_their_owners() -> None:
    """Every fork owns the pages until it is deleted or diverges, and then leaves them to the others."""
    run = started(model_of(), LENGTHS)
    store = store_of(run.cache)
    pool, pages = store.pool, store.owned_pages()
    capacity, free = pool.capacity, pool.free_list.free

    def owners() -> set[int]:
        return set(pool.owners(pages).tolist())

    forks = run.cache.fork(3)
    assert owners() == {4}
    run.on(forks.pop()).steps(tokens(4, 3, 0))
    assert owners() == {3}
    forks.pop().reset()
    assert owners() == {2}
    forks.pop()
    assert owners() == {1}
    assert (pool.capacity, pool.free_list.free) == (capacity, free)
    run.cache.check_integrity()
    run.steps(tokens(4, 3, 1))
    assert store_of(run.cache).pool is pool
    run.cache.check_integrity()


def test_the_original_may_go_first() -> None:
    run = started(model_of(), LENGTHS)
    pool = store_of(run.cache).pool
    used = pool.capacity - 1 - pool.free_list.free
    forks = [run.on(cache) for cache in run.cache.fork(2)]
    run.cache.reset()
    run.cache = None
    forks[0].steps(tokens(4, 20))
    forks[0].cache.reset()
    forks[1].cache.check_integrity()
    assert pool.capacity - 1 - pool.free_list.free == used
    alone = started(model_of(), LENGTHS)
    assert torch.equal(forks[1].steps(tokens(4, 20)), alone.steps(tokens(4, 20)))
    assert_equal_contents(forks[1].cache, alone.cache)
    # the last owner takes over the pages unchanged
    assert store_of(forks[1].cache).pool is pool


TURNS = [(5, 1, 30, 17), (0, 9, 2, 40), (3, 3, 3, 3), (25, 0, 0, 1), (1, 60, 8, 0), (7, 2, 1, 19)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.sampled(100)
def test_many_uneven_turns_equal_the_simulation(name: str) -> None:
    """Some requests say nothing in a turn, others a lot; answers of several tokens come between the turns."""
    with captured() as layers:
        followed = Followed(started(model_of(name), LENGTHS), layers, CONFIG)
        for turn, lengths in enumerate(TURNS):
            followed.feed(*ragged_prompts(lengths, seed=turn))
            for step in tokens(4, 6, turn).split(1, dim=1):
                followed.feed(step)


FULL = Precision(16, 16)
# all tokens leave the window at once and fill small pages, so steps often need new pages
HUNGRY = DiffKVConfig(FULL, FULL, alpha_high=1.0, alpha_low=0.0, window=1, page_bytes=512)


def assert_lossless_steps(runs: list[Run]) -> None:
    """Runs 20 steps of all runs in turns, and compares each with a model without a cache."""
    dense = model_of(attention="sdpa")
    for step in range(20):
        for number, run in enumerate(runs):
            logits = run.feed(tokens(1, 1, 100 * step + number))[:, -1]
            with torch.no_grad():
                expected = dense(run.ids, attention_mask=run.mask, use_cache=False).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
            for each in runs:
                each.cache.check_integrity()


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.sampled(100)
def test_forks_that_decode_in_turns_leave_each_other_pages(before: int) -> None:
    """Pages that one fork prepared for its next steps are not taken by another."""
    run = started(model_of(), (20,), HUNGRY)
    run.steps(tokens(1, before + 1))
    assert_lossless_steps([run, *(run.on(cache) for cache in run.cache.fork(4))])


@pytest.mark.parametrize("before", [0, 3, 7])
@pytest.mark.sampled(100)
def test_a_copy_of_a_fork_has_pages_for_its_next_steps(before: int) -> None:
    run = started(model_of(), (20,), HUNGRY)
    fork = run.on(run.cache.fork(1)[0])
    fork.steps(tokens(1, before + 1))
    assert_lossless_steps([fork.on(copy.deepcopy(fork.cache))])
