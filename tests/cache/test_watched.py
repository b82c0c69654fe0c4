"""Other threads look at a cache while `generate()` runs: the text is unchanged, and they see only finished steps."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401
import pytest
import torch
from captured_steps import FIELDS, build, generate
from recorded_graph import RecordedGraph
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_diffkv import DiffKVCache, DiffKVConfig, HandOverError, PrefixStore
from hf_diffkv.cache.report import held_bytes
from hf_diffkv.compat import passing

PROMPT = torch.randint(1, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(7))
# number of generated tokens, and number of runs
NEW, RUNS = 40, 10
LOSSY: dict[str, Any] = {"high": "K8V4", "low": "K4V2", "alpha_high": 1.2, "alpha_low": 0.5, "window": 6}
CONFIGS = {
    "lossless": DiffKVConfig.lossless(),
    "thresholds": DiffKVConfig(**LOSSY),
    "one precision": DiffKVConfig(high="K4V4", low="K4V4", alpha_high=0, alpha_low=0, window=6),
    "sinks": DiffKVConfig(**LOSSY, sinks=2),
    "budget": DiffKVConfig(**LOSSY, max_bytes=150_000),
}
Look = Callable[[DiffKVCache], Any]


@pytest.fixture(autouse=True)
def threads_often_change() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Watcher:
    """Looks at a cache in a loop, in a separate thread, while a block runs; then raises any failure there.

    Attributes:
        seen: tokens that the cache had at each look.
    """

    def __init__(self, *looks: Look) -> None:
        self.looks, self.seen = looks, []

    @contextmanager
    def watching(self, cache: DiffKVCache) -> Iterator[None]:
        stopped, errors = threading.Event(), []

        def watch() -> None:
            try:
                for look in itertools.cycle(self.looks):
                    if stopped.is_set():
                        return
                    found = look(cache)
                    if found is not None:
                        self.seen.append(found)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join(60)
            assert not thread.is_alive()
        if errors:
            raise errors[0]


def look_at_memory(cache: DiffKVCache) -> int | None:
    """Checks that the parts of a report agree; returns the tokens it counts."""
    report = cache.memory()
    if not report.layers:
        return None
    rows = [row for layer in report.layers for row in zip(layer.high, layer.low, layer.window, layer.pruned)]
    (seen,) = {sum(row) for row in rows}
    heads = sum(len(layer.high) for layer in report.layers)
    assert sum(report.tokens.values()) == seen * heads
    # keys and values of 16 elements in float32
    assert report.compressed_dense_bytes == seen * heads * 2 * 16 * 4
    assert report.payload_bytes <= report.bytes
    return seen


def last_compressed(cache: DiffKVCache) -> int:
    return cache.compressed_layers()[-1]


def held(cache: DiffKVCache) -> bool:
    return cache.layers[last_compressed(cache)].store is not None


def look_at_levels(cache: DiffKVCache) -> int | None:
    """Checks that no token outside the window and sinks is exact, and that every token inside them is."""
    if not held(cache):
        return None
    levels = cache.levels(last_compressed(cache))
    exact = (levels == 3).sum(-1)
    config = cache.config
    most = config.window + config.sinks
    assert (exact <= most).all() and (levels[..., -1] == 3).all()
    return levels.shape[-1]


def look_at_significance(cache: DiffKVCache) -> int | None:
    if not held(cache) or not cache.config.selects:
        return None
    scores = cache.significance(last_compressed(cache))
    assert scores.isfinite().all()
    return scores.shape[-1]


def look_at_tokens(cache: DiffKVCache) -> int | None:
    if not held(cache):
        return None
    keys, values, mask = cache.dequantize(last_compressed(cache))
    assert keys.isfinite().all() and values.isfinite().all()
    # a stored key is not zero
    assert ((keys != 0).any(-1) == mask).all()
    return keys.shape[2]


def look_at_integrity(cache: DiffKVCache) -> None:
    cache.check_integrity()


def look_at_layer(cache: DiffKVCache) -> int | None:
    keys = cache.layers[last_compressed(cache)].keys
    return None if keys is None else keys.shape[2]


def look_in_short(cache: DiffKVCache) -> int | None:
    assert held_bytes(cache) >= 0
    tokens = re.fullmatch(r"DiffKVCache\(1 request, (\d+) tokens, .* MB, 2 layers compressed\)", repr(cache))
    return None if tokens is None else int(tokens[1])


def copy_it(cache: DiffKVCache) -> int | None:
    twin = copy.deepcopy(cache)
    twin.check_integrity()
    return look_at_memory(twin)


LOOKS: dict[str, Look] = {
    "memory": look_at_memory,
    "levels": look_at_levels,
    "significance": look_at_significance,
    "dequantize": look_at_tokens,
    "check_integrity": look_at_integrity,
    "layer.keys": look_at_layer,
    "repr": look_in_short,
    "deepcopy": copy_it,
}


def text(model: PreTrainedModel, cache: Any, ids: Tensor = PROMPT, **options: Any) -> Tensor:
    """Returns `ids` and the text after them, all of equal length."""
    new = PROMPT.shape[1] + NEW - ids.shape[1]
    # generated tokens may well have the padding id
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
    return model.generate(ids, **passing(cache), **options)


def check_watched(model: PreTrainedModel, config: DiffKVConfig, looks: list[Look], runs: int = RUNS) -> None:
    expected_cache = DiffKVCache(model.config, config)
    expected = text(model, expected_cache)
    watcher = Watcher(*looks)
    for _ in range(runs):
        cache = DiffKVCache(model.config, config)
        with watcher.watching(cache):
            assert torch.equal(text(model, cache), expected)
        assert cache.memory() == expected_cache.memory()
    steps = set(range(PROMPT.shape[1], PROMPT.shape[1] + NEW))
    assert set(watcher.seen) <= steps
    # the watcher gets its turn while the text is generated
    assert looks == [look_at_integrity] or len(set(watcher.seen)) > 3


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_ten_watched_runs_have_the_unwatched_text(config: DiffKVConfig) -> None:
    """All reports are used, one after another."""
    check_watched(tiny_model("llama"), config, list(LOOKS.values()))


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
def test_each_report_alone(look: Look) -> None:
    check_watched(tiny_model("llama"), CONFIGS["thresholds"], [look], runs=2)


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_each_report_with_each_configuration(config: DiffKVConfig, look: Look) -> None:
    if look is look_at_significance and not config.selects:
        pytest.skip("has no significance")
    check_watched(tiny_model("llama"), config, [look])


MODELS: dict[str, dict[str, Any]] = {
    "ends with a window": {"name": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]},
    "begins with a window": {"name": "gemma3_text"},
    "ends with a state": {"name": "lfm2", "layer_types": ["full_attention", "conv"]},
    "begins with a state": {"name": "lfm2", "layer_types": ["conv", "full_attention"]},
    "shares layers": {
        "name": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
    },
}


@pytest.mark.parametrize("options", MODELS.values(), ids=list(MODELS))
def test_copies_made_meanwhile_are_of_a_finished_step(options: dict[str, Any]) -> None:
    """All layers of a copy, compressed or not, have seen the same tokens, and the text from there on is the same."""
    model = tiny_model(**options)
    expected = text(model, DynamicCache(config=model.config))
    copies: list[DiffKVCache] = []

    def keep(cache: DiffKVCache) -> int:
        twin = copy.deepcopy(cache)
        copies.append(twin)
        return twin.get_seq_length()

    cache, watcher = DiffKVCache(model.config, CONFIGS["lossless"]), Watcher(keep)
    with watcher.watching(cache):
        assert torch.equal(text(model, cache), expected)
    chosen = {twin.get_seq_length(): twin for twin in copies if twin.get_seq_length()}
    assert len(chosen) > 3
    for seen, twin in list(chosen.items())[:: max(1, len(chosen) // 4)]:
        twin.check_integrity()
        if seen + 1 < expected.shape[1]:
            assert torch.equal(text(model, twin, expected[:, : seen + 1]), expected)


def test_a_cache_saved_meanwhile_goes_on(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text")
    expected = text(model, DynamicCache(config=model.config))
    folders = (tmp_path / str(number) for number in itertools.count())
    saved: list[Path] = []

    def save(cache: DiffKVCache) -> None:
        folder = next(folders)
        cache.save_pretrained(folder, model)
        saved.append(folder)

    cache = DiffKVCache(model.config, CONFIGS["lossless"])
    with Watcher(save).watching(cache):
        assert torch.equal(text(model, cache), expected)
    lengths = set()
    for folder in saved[:: max(1, len(saved) // 5)]:
        loaded = DiffKVCache.from_pretrained(folder, model)
        seen = loaded.get_seq_length()
        lengths.add(seen)
        # it knows its tokens, so another prompt is refused
        pieces = loaded.held_tokens.pieces(seen)
        assert sum(piece.ids.shape[1] for piece in pieces) == seen
        if 0 < seen < expected.shape[1] - 1:
            assert torch.equal(text(model, loaded, expected[:, : seen + 1]), expected)
    assert len(lengths) > 1


def test_a_prefix_stored_meanwhile_has_its_own_tokens() -> None:
    model = tiny_model("llama")
    config = CONFIGS["lossless"]
    expected = text(model, DynamicCache(config=model.config))
    prefixes = PrefixStore(model, config, device_bytes=64 << 20)
    cache = DiffKVCache(model.config, config)
    with Watcher(lambda held: prefixes.insert(expected, held) and None).watching(cache):
        assert torch.equal(text(model, cache), expected)
    assert len(prefixes) > 3
    for tokens in range(PROMPT.shape[1] + 1, expected.shape[1], 7):
        ids = expected[:, :tokens]
        assert torch.equal(text(model, prefixes.lookup(ids), ids), expected)


@pytest.mark.usefixtures("recorded")
def test_captured_steps() -> None:
    model = build(1)
    ids = torch.randint(0, 96, (1, 9), generator=torch.Generator().manual_seed(1))
    config = DiffKVConfig(**FIELDS)
    expected = generate(model, ids, DiffKVCache(model.config, config), 10).sequences
    cache = DiffKVCache(model.config, config)
    made = len(RecordedGraph.made)
    with Watcher(copy_levels, look_at_integrity).watching(cache):
        assert torch.equal(generate(model, ids, cache, 10).sequences, expected)
    assert len(RecordedGraph.made) > made


def copy_levels(cache: DiffKVCache) -> None:
    cache.memory()
    if held(cache):
        levels = cache.levels(0)
        assert levels.shape[-1] == cache.stores.all[0].seen


@contextmanager
def within(model: PreTrainedModel, layer: int, hook: Callable[..., Any]) -> Iterator[None]:
    """Calls `hook` within a forward, after a layer."""
    handle = model.model.layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_reports_within_a_forward_are_refused_and_change_nothing() -> None:
    model = tiny_model("llama")
    config = CONFIGS["thresholds"]
    expected = text(model, DiffKVCache(model.config, config))
    cache, refused = DiffKVCache(model.config, config), []

    def look(*_: Any) -> None:
        for report in (look_at_memory, look_at_levels, look_at_integrity, copy.deepcopy):
            if held(cache) or report is not look_at_levels:
                with pytest.raises(HandOverError, match="in progress"):
                    report(cache)
        # these know what the host knows
        look_in_short(cache)
        refused.append(True)

    with within(model, 0, look):
        assert torch.equal(text(model, cache), expected)
    assert len(refused) == NEW


class Looking(BaseStreamer):
    """Looks at a cache at each token, in the generating thread."""

    def __init__(self, cache: DiffKVCache) -> None:
        self.cache, self.seen = cache, []

    def put(self, value: Tensor) -> None:
        self.seen.append(look_at_memory(self.cache))

    def end(self) -> None:
        self.put(torch.empty(0))


def test_a_streamer_looks_between_steps() -> None:
    model = tiny_model("llama")
    expected = text(model, DiffKVCache(model.config, CONFIGS["thresholds"]))
    cache = DiffKVCache(model.config, CONFIGS["thresholds"])
    looking = Looking(cache)
    assert torch.equal(text(model, cache, streamer=looking), expected)
    last = PROMPT.shape[1] + NEW - 1
    assert looking.seen == [None, *range(PROMPT.shape[1], last + 1), last]


class Stop(Exception):
    pass


@pytest.mark.parametrize("in_thread", [False, True], ids=["its thread lives", "its thread is gone"])
def test_a_forward_that_stops_halfway_holds_nobody_up(in_thread: bool) -> None:
    """A thread that waits for its end continues, and the cache is free again after `reset`."""
    model = tiny_model("llama", "diffkv")
    cache = DiffKVCache(model.config, CONFIGS["thresholds"])
    told: list[Any] = []
    with torch.no_grad():
        model(PROMPT, **passing(cache))

    def look() -> None:
        try:
            told.append(cache.memory())
        except HandOverError as error:
            told.append(error)

    waiting = threading.Thread(target=look, daemon=True)

    def stop(*_: Any) -> None:
        waiting.start()
        raise Stop

    def forward() -> None:
        with within(model, 0, stop), pytest.raises(Stop), torch.no_grad():
            model(PROMPT[:, :1], **passing(cache))

    if in_thread:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(60)
    else:
        forward()
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(told) == 1
    with pytest.raises(HandOverError, match=r"halfway.*reset\(\)"), torch.no_grad():
        model(PROMPT[:, :1], **passing(cache))
    cache.reset()
    with torch.no_grad():
        model(PROMPT, **passing(cache))
    assert look_at_memory(cache) == PROMPT.shape[1]


def test_a_forward_of_fewer_layers_ends_as_well() -> None:
    """A forward whose last layer never runs, as with an early exit, ends when the next one begins."""
    model = tiny_model("llama", "diffkv", num_hidden_layers=3)
    cache = DiffKVCache(model.config, CONFIGS["lossless"])
    last, model.model.layers = model.model.layers[2], model.model.layers[:2]
    with torch.no_grad():
        model(PROMPT, **passing(cache))
        assert cache.memory().layers[-1].layer_idx == 1
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(cache.memory().tokens["window"]), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and seen == [cache.memory().tokens["window"]]
        model(PROMPT[:, :1], **passing(cache))
    cache.check_integrity()
    assert last is not None and cache.get_seq_length() == PROMPT.shape[1] + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    model = tiny_model("llama", "diffkv")
    cache = DiffKVCache(model.config, CONFIGS["lossless"])
    with torch.no_grad():
        model(PROMPT, **passing(cache))
    held_up, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.stores.between_forwards():
            held_up.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held_up.wait(60)
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=lambda: send.send(look_at_memory(cache)))
        child.start()
        assert receive.poll(60) and receive.recv() == PROMPT.shape[1]
        child.join(60)
    finally:
        go_on.set()
        thread.join(60)
