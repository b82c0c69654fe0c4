"""The decode benchmark on a CPU, with tiny-lm and a few tokens: filling, checks, timing and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_diffkv import DiffKVCache, DiffKVConfig


@pytest.mark.slow
def test_all_caches_in_turns(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module, output = script("decode_cpu"), tmp_path / "decode_cpu.jsonl"
    output.write_text('{"context": 1024, "cache": "of an older format"}\n')
    options = ["--models", "tiny-lm", "--contexts", "90", "150", "--large-batch", "3", "90", "--steps", "2"]
    # threads that share a processor wait for each other, so one is enough
    module.main([*options, "--threads", "1", "--output", str(output)])
    rows = [json.loads(line) for line in output.read_text().splitlines()[1:]]
    names = list(script("cpu_caches").DIFFKV)
    assert {"DynamicCache", "StaticCache", *names} <= {row["cache"] for row in rows}
    cases = [(row["cache"], row["threads"], row["batch"], row["context"]) for row in rows]
    assert len(set(cases)) == len(cases) == len({row["cache"] for row in rows}) * 3
    for row in rows:
        for field in ("ms", "attention_ms"):
            assert 0 < row[field][0] <= row[field][1] <= row[field][2]
        if row["cache"] in names:
            # 6 layers of 2 heads
            assert sum(row["tokens"].values()) == 12 * row["batch"] * row["context"]
    held = {row["cache"]: row["tokens"] for row in rows if row["context"] == 150 and row["cache"] in names}
    assert held["DiffKV balanced"]["low"] == 0
    assert held["DiffKV paper"]["high"] > 0 and held["DiffKV paper"]["low"] > 0
    shown = capsys.readouterr().out
    assert "| tiny-lm | 1 | 3 | 90 | DiffKV balanced |" in shown and "| tiny-lm | 1 | StaticCache |" in shown
    assert output.with_suffix(".png").stat().st_size > 1000
    before = output.read_text()
    module.main(["--report", "--output", str(output)])
    assert "| tiny-lm | 1 | 3 | 90 | DiffKV balanced |" in capsys.readouterr().out
    assert output.read_text() == before


def test_a_filled_cache_holds_the_given_keys(script) -> None:
    """Reads the keys back from a lossless cache, and lets the next step attend to them."""
    module = script("cpu_caches")
    model = module.load_model("tiny-lm", torch.float32, layers=1)
    tokens = module.Tokens.draw(model, 2, 100)
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    module.fill(model, cache, tokens)
    assert cache.get_seq_length() == 100
    assert torch.equal(cache.layers[3].keys, tokens.key) and torch.equal(cache.layers[3].values, tokens.value)


def test_a_lossy_cache_is_not_timed(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("decode_cpu")
    monkeypatch.setattr(DiffKVConfig, "lossless", lambda: DiffKVConfig(alpha_high=1e9))
    with pytest.raises(SystemExit, match="lossless logits differ from those in float32"):
        module.main(["--models", "tiny-lm", "--dtype", "float32", "--output", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "none.jsonl").exists()


def test_slopes_are_of_lines_through_medians(script) -> None:
    module = script("report_cpu")
    row = {"device": "cpu", "dtype": "bfloat16", "model": "tiny-lm", "batch": 1, "threads": 1, "cache": "DynamicCache"}
    rows = [
        {**row, "context": context, "ms": [0.0, 3 + 0.002 * context, 9.0], "attention_ms": [0.0, 0.001 * context, 1.0]}
        for context in (1000, 2000, 4000)
    ]
    line = module.slopes(rows).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["tiny-lm", "1", "DynamicCache"]
    assert [float(cell) for cell in cells[3:]] == pytest.approx([2000, 3, 1000], rel=1e-6)


def test_a_model_that_is_not_there_is_said(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = script("cpu_caches")
    monkeypatch.setitem(module.FOLDERS, "smollm2", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="make models"):
        module.load_model("smollm2", torch.float32, layers=1)


def test_prompts_of_all_caches(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module, output = script("prompt_cpu"), tmp_path / "prompt_cpu.jsonl"
    options = ["--models", str(module.TINY), "--lengths", "90", "--chunks", "0", "40", "--repeats", "1"]
    module.main([*options, "--threads", "1", "--no-memory", "--output", str(output)])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    names = {"DynamicCache", "StaticCache", "DiffKV balanced", "DiffKV paper"}
    assert {(row["cache"], row["chunk"]) for row in rows} == {(name, chunk) for name in names for chunk in (0, 40)}
    assert all(row["ms"] > 0 and row["threads"] == 1 for row in rows)
    assert "| tiny-lm | 90 | 40 | StaticCache |" in capsys.readouterr().out
