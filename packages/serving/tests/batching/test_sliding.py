"""Sliding-window layers of continuous batching: their memory, and what is computed on it."""

from __future__ import annotations

import pytest
import torch
from batching import LOSSLESS, chunks, request_config
from hf_diffkv_serving.batching.shapes import AttentionShape, SlidingShape
from hf_diffkv_serving.batching.sliding import FEWEST_QUERIES, SlidingWindows
from tiny_models import tiny_model
from torch import Tensor
from transformers import CONFIG_MAPPING

from hf_diffkv.ops.softmax import Softmax

HEADS, QUERY_HEADS, DIM = 2, 4, 8


def make_windows(window: int, longest: int = 1000, requests: int = 3) -> SlidingWindows:
    config = CONFIG_MAPPING["gemma3_text"](head_dim=DIM, sliding_window=window)
    shape = AttentionShape(HEADS, QUERY_HEADS, DIM, DIM, torch.float64, torch.device("cpu"))
    sliding = SlidingShape((1, 4), window)
    windows = SlidingWindows(config, sliding, shape)
    windows.resize(requests, longest)
    assert windows.bytes == windows.bytes_for(requests, longest) == sliding.bytes(shape, requests, longest)
    return windows


def dense(
    query: Tensor, key: Tensor, value: Tensor, window: int, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of all tokens of a request at once; [heads, tokens, dim] each."""
    tokens = query.shape[1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    group = QUERY_HEADS // HEADS
    logits = query @ key.repeat_interleave(group, 0).mT * 0.3
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    top = torch.zeros(QUERY_HEADS) - torch.inf if sinks is None else sinks
    weights = torch.cat([logits, top[:, None, None].expand(-1, tokens, 1)], dim=2).softmax(2)[..., :-1]
    return weights @ value.repeat_interleave(group, 0)


@pytest.mark.parametrize(("window", "softcap", "sinks"), [(1, None, False), (24, 2.0, False), (200, None, True)])
def test_attention_is_that_of_whole_requests(window: int, softcap: float | None, sinks: bool) -> None:
    """Requests come, go on in parts mixed with single tokens, fork, are taken out and in again, and go."""
    windows, generator = make_windows(window), torch.Generator().manual_seed(0)
    sink = torch.randn(QUERY_HEADS, generator=generator, dtype=torch.float64) if sinks else None
    total = 2 * max(window, FEWEST_QUERIES) + 40

    def request() -> dict[str, Tensor]:
        heads = {"query": QUERY_HEADS, "key": HEADS, "value": HEADS}
        random = {name: torch.randn(2, n, total, DIM, generator=generator).double() for name, n in heads.items()}
        want = [dense(*(random[name][layer] for name in heads), window, softcap, sink) for layer in range(2)]
        return {**random, "want": torch.stack(want)}

    given, seen = {name: request() for name in "abc"}, dict.fromkeys("abc", 0)

    def forward(tokens: dict[str, int]) -> None:
        parts = {name: slice(seen[name], seen[name] + count) for name, count in tokens.items()}
        windows.begin([(name, seen[name], count) for name, count in tokens.items()])
        for index, layer in enumerate((1, 4)):
            packed = [
                torch.cat([given[name][kind][index][:, part] for name, part in parts.items()], dim=1)[None]
                for kind in ("query", "key", "value", "want")
            ]
            output = windows.attend(layer, *packed[:3], Softmax(0.3, softcap, sink))
            torch.testing.assert_close(output, packed[3])
        for name, count in tokens.items():
            seen[name] += count

    forward({"a": 5, "b": total - 30})
    windows.resize(7, 1000)
    forward({"b": 1, "c": 1, "a": 20})
    # what they hold moves
    windows.resize(3, 1000)
    forward({"a": 1, "c": 1, "b": 1})
    forward({"c": window + 3, "a": 0})
    kept = windows.dense_layers("c", seen["c"])
    assert all(layer.keys.shape == (1, HEADS, min(seen["c"], window - 1), DIM) for layer in kept.values())
    windows.release("c")
    windows.fork("b", "d", seen["b"])
    given["d"], seen["d"] = given["b"], seen["b"]
    forward({"d": 3, "a": 2})
    windows.release("d")
    windows.load("c", kept)
    forward({"b": 2, "c": 1, "a": 1})
    # as many keys for both where the window is full
    forward({"b": 1, "a": 1})
    forward({"c": 4, "a": total - seen["a"] - 1})
    for name in "abc":
        windows.release(name)
    assert not windows.requests


def test_windows_are_made_for_the_requests_that_come() -> None:
    """Makes windows as long as the requests need, within the budget."""
    model, budget = tiny_model("gemma3_text", sliding_window=512), 2_000_000
    manager = model.init_continuous_batching(request_config(LOSSLESS, budget), chunks(64))
    cache, held = manager._cache, []
    for tokens, count in ((20, 8), (600, 1), (20, 12)):
        rooms = [cache._make_room(None, tokens) and cache.slots.adopt() for _ in range(count)]
        assert all(room is not False for room in rooms) and cache.slots.count >= count
        memory = manager.memory()
        assert memory.held_bytes == cache.slots.bytes + cache.sliding.bytes <= budget
        held.append(cache.sliding.bytes / cache.slots.count)
        for slot in rooms:
            cache.slots.release(slot)
    assert held[0] < held[1]
    manager.stop()
