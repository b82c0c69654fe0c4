"""Errors and interrupts at any point: the cache is as before, or refuses further use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, assert_equal_contents, model_of, started, tokens

from hf_diffkv import DiffKVCache, DiffKVConfig, PrefixStore
from hf_diffkv.cache import held_tokens, layer, rows
from hf_diffkv.cache.errors import HandOverError
from hf_diffkv.compat import passing
from hf_diffkv.pages import pool
from hf_diffkv.store import compaction, forks, prompt, state

CONFIG = DiffKVConfig.paper(alpha_high=1.0, alpha_low=0.5, window=16)
LENGTHS = (50, 30)


class Failure(RuntimeError):
    """An error like those of PyTorch, for example when a device runs out of memory."""


def begun() -> Run:
    run = started(model_of(), LENGTHS, CONFIG)
    run.steps(tokens(2, 20))
    return run


def recorded() -> Run:
    run = begun()
    run.cache.activate_past_recording()
    run.feed(tokens(2, 5))
    return run


def failing(
    monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, does_it: bool, error: type[BaseException] = Failure
) -> Callable[[], None]:
    """Makes a function fail from now on, before or after its work; returns a function that ends this."""
    whole = getattr(holder, name)

    def fail(*args: Any, **options: Any) -> None:
        if does_it:
            whole(*args, **options)
        raise error

    monkeypatch.setattr(holder, name, fail)
    return lambda: monkeypatch.setattr(holder, name, whole)


def chunk(run: Run) -> None:
    run.feed(tokens(2, 9, 5))


def step(run: Run) -> None:
    run.feed(tokens(2, 1, 5))


def reorder(run: Run) -> None:
    run.cache.reorder_cache(torch.tensor([1, 0]))


HALFWAY = {
    "compaction": (begun, step, compaction, "compact", True),
    "compaction before a report": (begun, lambda run: run.cache.memory(), compaction, "compact", True),
    "window of a chunk": (begun, chunk, prompt, "_fill_window", False),
    "pages of a chunk": (begun, chunk, prompt, "rewrite_rows", True),
    "padding of a chunk": (begun, chunk, state.Padding, "append", False),
    "padding of a step": (begun, step, state.Padding, "append", False),
    "one of two stores": (begun, reorder, rows, "move_rows", True),
    "ids of a reordered cache": (begun, reorder, held_tokens.HeldTokens, "select", False),
    "ids of a cropped cache": (recorded, lambda run: run.crop(2), held_tokens.HeldTokens, "crop", False),
    "tokens that a crop keeps": (recorded, lambda run: run.crop(2), prompt, "_fill_window", False),
}


FORKED = {
    "nothing counted yet": (forks, "_release_at_end", False),
    "an owner too many": (pool.PagePool, "share", True),
    "a twin without an end": (forks, "replace", False),
}


@pytest.mark.parametrize("case", FORKED)
def test_a_fork_that_stopped_halfway_leaves_no_pages_without_an_owner(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected = begun(), begun()
    end = failing(monkeypatch, *FORKED[case])
    with pytest.raises(Failure):
        run.cache.fork(1)
    end()
    with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
        step(run)
    run.cache.reset()
    again = started(run.model, LENGTHS, cache=run.cache)
    again.steps(tokens(2, 20))
    twin = again.on(again.cache.fork(1)[0])
    for each in (again, twin, expected):
        step(each)
    for each in (again, twin):
        assert_equal_contents(each.cache, expected.cache)


def test_a_first_prompt_that_stopped_between_two_layers_is_refused(tmp_path: Path) -> None:
    """No layer disagrees with another about the number of tokens yet; the last ones have none."""
    model, ids = model_of(), tokens(1, 60)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    store = PrefixStore(model, CONFIG)
    cache = store.lookup(ids)
    hook = model.model.layers[0].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **passing(cache), max_new_tokens=2)
    hook.remove()
    uses = {
        "save_pretrained": lambda: cache.save_pretrained(tmp_path),
        "crop": lambda: cache.crop(0),
        "reorder_cache": lambda: cache.reorder_cache(torch.tensor([0])),
        "fork": lambda: cache.fork(1),
        "levels": lambda: cache.levels(0),
        "activate_past_recording": lambda: cache.activate_past_recording(),
        "insert": lambda: store.insert(ids, cache),
        "generate": lambda: model.generate(ids, **passing(cache), max_new_tokens=2),
    }
    for name, use in uses.items():
        with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
            use()
            pytest.fail(f"{name} used it")
    assert len(store) == 0 and not list(tmp_path.iterdir())
    cache.reset()
    expected = DiffKVCache(model.config, CONFIG)
    for each in (cache, expected):
        model.generate(ids, **passing(each), max_new_tokens=2)
    assert_equal_contents(cache, expected)


@pytest.mark.parametrize("case", HALFWAY)
def test_what_stopped_halfway_is_refused_until_reset(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, change, *place = HALFWAY[case]
    run = begin()
    end = failing(monkeypatch, *place)
    with pytest.raises(Failure):
        change(run)
    end()
    for use in (step, chunk, reorder, lambda run: run.cache.levels(0), lambda run: run.cache.fork(1)):
        with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
            use(run)
    with pytest.raises(HandOverError, match="stopped halfway"):
        step(run.on(copy.deepcopy(run.cache)))
    run.cache.reset()
    again = started(run.model, LENGTHS, cache=run.cache)
    again.steps(tokens(2, 20))
    assert_equal_contents(again.cache, begun().cache)


INTERRUPTED = {
    "before it is begun": (layer.DiffKVLayer, "_begin", False),
    "begun": (layer.DiffKVLayer, "_begin", True),
    "begun, not counted": (layer.DiffKVLayer, "see", False),
    "stored, not counted": (layer, "Changing", False),
    "stored": (layer.DiffKVLayer, "_attend", True),
}


@pytest.mark.parametrize("change", [step, chunk])
@pytest.mark.parametrize("begin", [begun, recorded])
@pytest.mark.parametrize("case", INTERRUPTED)
def test_an_interrupt_in_the_first_layer(
    case: str, begin: Callable[[], Run], change: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected = begin(), begin()
    end = failing(monkeypatch, *INTERRUPTED[case], KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        change(run)
    end()
    if case == "before it is begun":
        change(run)
        change(expected)
        assert_equal_contents(run.cache, expected.cache)
        return
    for use in (step, chunk, lambda run: run.cache.fork(1)):
        with pytest.raises(HandOverError, match=r"stopped halfway.*reset\(\)"):
            use(run)
    run.cache.reset()
    again = started(run.model, LENGTHS, cache=run.cache)
    again.steps(tokens(2, 20))
    assert_equal_contents(again.cache, begun().cache)


UNDONE = {
    "levels of a chunk": (chunk, prompt, "decide_levels"),
    "window of a chunk": (chunk, prompt, "_exact_tokens"),
    "attention of a chunk": (chunk, prompt, "attend_with_past"),
}


@pytest.mark.parametrize("case", UNDONE)
def test_what_fails_before_pages_change_is_undone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, *place = UNDONE[case]
    run, expected = begun(), begun()
    end = failing(monkeypatch, *place, True)
    with pytest.raises(Failure):
        change(run)
    end()
    assert_equal_contents(run.cache, expected.cache)
    for use in (step, chunk, step):
        use(run)
        use(expected)
    assert_equal_contents(run.cache, expected.cache)


def test_a_fork_that_gets_no_memory_leaves_its_twin_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run, expected = begun(), begun()
    fork = run.on(run.cache.fork(1)[0])
    for _ in range(2):
        end = failing(monkeypatch, state.Padding, "copy", True)
        with pytest.raises(Failure):
            step(fork)
        end()
        for each in (run, fork):
            each.cache.check_integrity()
    del fork
    step(run)
    step(expected)
    assert_equal_contents(run.cache, expected.cache)


def test_a_pool_whose_free_list_gets_no_memory_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pool.PagePool(64, torch.device("cpu"))
    pages.ensure_free(5)
    taken = pages.free_list.take(torch.tensor([3]))[1]
    before = (pages.capacity, pages.free_list.capacity, pages.free_list.ids().tolist())
    end = failing(monkeypatch, torch, "where", True)
    with pytest.raises(Failure):
        pages.ensure_free(9)
    end()
    assert before == (pages.capacity, pages.free_list.capacity, pages.free_list.ids().tolist())
    pages.ensure_free(9)
    assert sorted([*taken.tolist(), *pages.free_list.ids().tolist()]) == list(range(1, pages.capacity))
