"""Requests of continuous batching that begin with what earlier ones left: turns are those of one cache."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import LOSSLESS, LOSSY, MIXED, check_empty, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.manager import DiffKVBatchingManager
from tiny_models import tiny_model
from transformers.generation.continuous_batching.utils import WorkloadHints

from hf_diffkv import DiffKVCache, DiffKVConfig, PrefixStore
from hf_diffkv.compat import passing

NEW, BOUNDARY = 9, 60


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Tokens of each forward, by request."""
    found: dict[str, list[int]] = defaultdict(list)
    extend = ContinuousCache.extend_read_and_write_indices

    def noted(cache: ContinuousCache, request_id: str, past: int, tokens: int, *indices: Any) -> None:
        found[request_id].append(tokens)
        extend(cache, request_id, past, tokens, *indices)

    monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", noted)
    return found


def ask(manager: DiffKVBatchingManager, name: str, ids: list[int]) -> list[int]:
    manager.add_request(ids, name, max_new_tokens=NEW)
    result = manager.get_result(timeout=60)
    assert result is not None and result.request_id == name and result.error is None
    return result.generated_tokens


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", LOSSY),
        ("llama", replace(LOSSY, alpha_high=0.6, rotate=True, center=True, sinks=4)),
        ("gemma3_text", LOSSY),
        ("llama", MIXED),
        ("llama", replace(LOSSY, metadata_bits=16)),
    ],
)
@pytest.mark.sampled(100)
def test_turns_are_those_of_one_cache(
    name: str, config: DiffKVConfig, forwards: dict[str, list[int]], tmp_path: Path
) -> None:
    """Levels and text, and nothing is computed but new tokens.

    The first turn begins with a prefix that `generate` computed, the last one finds its own in the folder, on a manager
    for shorter requests.
    """
    model = tiny_model(name, dtype=torch.float64)
    store = PrefixStore(model, config, folder=tmp_path)
    turns = prompts((90, 30, 1, 70))
    store.prefill(torch.tensor(turns[0][:BOUNDARY]))
    manager = model.init_continuous_batching(request_config(config, 1 << 20), chunks())
    manager.use_prefixes(store)
    manager.start()
    said: list[int] = []
    for turn, new in enumerate(turns):
        if turn == 3:
            store.save()
            manager.stop()
            store = PrefixStore(model, config, device_bytes=0, folder=tmp_path)
            hints = WorkloadHints(max_prompt_length=len(said + new), max_generated_length=NEW)
            manager = model.init_continuous_batching(request_config(config, 1 << 20), chunks(), hints)
            manager.use_prefixes(store)
            manager.start()
        said += new
        said += ask(manager, str(turn), said)
        # the last token of a turn was never stored
        known = BOUNDARY + 1 if turn == 0 else 0
        assert sum(forwards[str(turn)]) == len(new) + NEW - known
    check_empty(manager._cache.slots)
    manager.stop()
    assert store.stats.hits["disk"] == 1
    cache, at, compared = DiffKVCache(model.config, config), 0, 0
    model.set_attn_implementation("diffkv")
    starts = [sum(map(len, turns[: turn + 1])) + turn * NEW for turn in range(4)]
    answers = {start + i for start in starts for i in range(NEW)}
    forwards["0"].insert(0, BOUNDARY)
    for turn in range(4):
        for tokens in forwards[str(turn)]:
            with torch.no_grad():
                logits = model(torch.tensor([said[at : at + tokens]]), **passing(cache)).logits
            at += tokens
            if at in answers:
                assert int(logits[0, -1].argmax()) == said[at]
                compared += 1
    assert at == len(said) - 1 and compared == 4 * NEW
    held = store.lookup(torch.tensor(said))
    assert held.get_seq_length() == at
    for layer in cache.compressed_layers():
        assert torch.equal(held.levels(layer), cache.levels(layer))


def test_many_requests_share_a_prefix(forwards: dict[str, list[int]]) -> None:
    model = tiny_model("llama")
    store = PrefixStore(model, LOSSLESS)
    document, *questions = prompts((100, *range(1, 13)))
    store.prefill(torch.tensor(document))
    manager = model.init_continuous_batching(request_config(LOSSLESS, 400_000), chunks(max_requests_per_batch=4))
    manager.use_prefixes(store)
    manager.start()
    asked = {manager.add_request(document + ids, max_new_tokens=NEW): ids for ids in questions}
    results = [manager.get_result(timeout=60) for _ in asked]
    manager.stop()
    for result in results:
        ids = asked[result.request_id]
        assert result.generated_tokens == expected(model, document + ids, NEW)
        assert sum(forwards[result.request_id]) == len(ids) + NEW - 1


def test_prefixes_of_another_configuration_are_refused() -> None:
    model = tiny_model("llama")
    manager = model.init_continuous_batching(request_config(LOSSY), chunks())
    with pytest.raises(ValueError, match="different model or configuration"):
        manager.use_prefixes(PrefixStore(model, LOSSLESS))
    manager.stop()
