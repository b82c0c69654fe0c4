"""Other threads that look at a cache while `generate()` runs: the text stays, and they see finished steps alone."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_steps import generate
from captured_steps import build as small_model
from recorded_graph import RecordedGraph, record_launches
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_diffkv import DiffKVCache, DiffKVConfig, HandOverError
from hf_diffkv.cache.graphs import GRAPH_TYPES
from hf_diffkv.cache.report import held_bytes
from hf_diffkv.compat import passing

PROMPT = torch.randint(1, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(7))
# how many tokens are generated, and in how many runs
NEW, RUNS = 40, 10
CONFIGS = {
    "lossless": DiffKVConfig.lossless(),
    "thresholds": DiffKVConfig.paper(alpha_high=1.2, alpha_low=0.5, window=6)
    if hasattr(DiffKVConfig, "paper")
    else DiffKVConfig(alpha_high=1.2, alpha_low=0.5, window=6),
    "one precision": DiffKVConfig(high="K4V4", low="K4V4", alpha_high=0, alpha_low=0, window=6),
    "intervals": DiffKVConfig(alpha_high=1.2, alpha_low=0.5, window=6, compaction_interval=3, sinks=2),
    "budget": DiffKVConfig(alpha_high=1.2, alpha_low=0.5, window=6, max_bytes=150_000),
}
Look = Callable[[DiffKVCache], Any]


@pytest.fixture(autouse=True)
def threads_often_change() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Watcher:
    """Looks at a cache in a loop, in a thread of its own, while a block runs; raises there what went wrong.

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
    """A report whose parts fit together; returns the tokens it counts."""
    report = cache.memory()
    if not report.layers:
        return None
    per_head = {sum(layer.high[h] + layer.low[h] + layer.window[h] + layer.pruned[h] for _ in [0])
                for layer in report.layers for h in range(len(layer.high))}
    assert len(per_head) == 1, per_head
    seen = per_head.pop()
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
    """Outside of the window and sinks no token is exact, inside of them every one is."""
    if not held(cache):
        return None
    levels = cache.levels(last_compressed(cache))
    exact = (levels == 3).sum(-1)
    config = cache.config
    most = config.window + config.sinks + config.compaction_interval - 1
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
    # a stored key is no zero
    assert ((keys != 0).any(-1) == mask).all()
    return keys.shape[2]


def look_at_integrity(cache: DiffKVCache) -> None:
    cache.check_integrity()


def look_at_layer(cache: DiffKVCache) -> int | None:
    keys = cache.layers[last_compressed(cache)].keys
    return None if keys is None else keys.shape[2]


def look_in_short(cache: DiffKVCache) -> None:
    assert repr(cache).startswith("DiffKVCache(") and held_bytes(cache) >= 0


def copy_it(cache: DiffKVCache) -> int | None:
    twin = copy.deepcopy(cache)
    twin.check_integrity()
    return look_at_memory(twin)


def fork_it(cache: DiffKVCache) -> int | None:
    (twin,) = cache.fork(1)
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


def text(model: PreTrainedModel, cache: Any, new: int = NEW) -> Tensor:
    return model.generate(PROMPT, **passing(cache), max_new_tokens=new, do_sample=False)


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
    # the watcher has its turn while the text is generated
    assert not watcher.looks or look_in_short in looks or look_at_integrity in looks or len(set(watcher.seen)) > 3


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_ten_watched_runs_have_the_unwatched_text(config: DiffKVConfig) -> None:
    """With all reports, one after another."""
    check_watched(tiny_model("llama"), config, list(LOOKS.values()))
