"""The prefix store benchmark, on tiny-lm with a few tokens: checks, timing and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_diffkv import DiffKVCache, PrefixStore

OPTIONS = ["--model", "tiny-lm", "--lengths", "100", "--repeats", "2", "--output"]


def test_all_ways_in_turns(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "prefix_store.json"
    script("prefix_store").main([*OPTIONS, str(output)])
    found = json.loads(output.read_text())
    assert {"device", "torch", "transformers", "hf_diffkv", "commit", "dtype"} <= found["about"].keys()
    rows = {row["way"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 10
    for row in rows.values():
        assert 0 < row["loading_ms"][1] < row["ms"][1] and 0 < row["cpu_ms"][1]
    # 6 layers of 2 heads of 64 elements, keys and values in bfloat16
    assert rows["DynamicCache, memory"]["memory_bytes"] == 100 * 6 * 2 * 64 * 2 * 2
    assert rows["DynamicCache, safetensors"]["file_bytes"] > 100 * 6 * 2 * 64 * 2 * 2
    assert rows["PrefixStore, disk"]["file_bytes"] > rows["PrefixStore, memory"]["memory_bytes"] > 50_000
    assert "| 100 | PrefixStore, disk |" in capsys.readouterr().out


def test_a_store_that_gives_something_else_is_not_timed(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(store: PrefixStore, ids: torch.Tensor, content: object = None) -> DiffKVCache:
        return DiffKVCache(store.model.config, alpha_high=1e9)

    module = script("prefix_store")
    monkeypatch.setattr(PrefixStore, "lookup", lookup)
    with pytest.raises(SystemExit, match="other logits"):
        module.main([*OPTIONS, str(tmp_path / "none.json")])
    assert not (tmp_path / "none.json").exists()
