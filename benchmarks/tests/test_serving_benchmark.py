"""The serving benchmark on tiny-lm with a few requests: checks, measurements in turns and reports."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (5, 23),
    reason="this release batches otherwise",
)
OPTIONS = ["--cases", "tiny-lm", "--requests", "4", "--turns", "1", "--first-token", "100", "--prompt-turns", "1"]
ENGINES = ["Transformers, paged", "DiffKV, default", "DiffKV, 22 %"]
# 6 layers of 2 heads of 64 elements, keys and values in bfloat16
TOKEN = 6 * 2 * 64 * 2 * 2


@pytest.mark.slow
def test_engines_take_turns_at_equal_bytes(script, documented, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "serving.jsonl"
    script("serving").main([*OPTIONS, "--threads", "1", "--output", str(output)])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["engine"] for row in rows] == ENGINES + ENGINES[:2]
    budget = 4 * (200 + 16) * TOKEN
    for row in rows[:3]:
        assert {"device", "torch", "transformers", "commit", "dtype"} <= row.keys()
        # four uncompressed requests use the whole budget; at 22 % with windows, a little less than a quarter of it
        least = 0.22 if row["engine"] == ENGINES[-1] else 0.25
        assert row["max_bytes"] == budget and least * budget < row["bytes"] <= budget
        assert 1 <= row["mean"] <= row["most"] <= 4
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(row["new_tokens"])
    assert all(row["seconds"][0] > 0 for row in rows[3:])
    assert "| tiny-lm | 100 | DiffKV, default |" in capsys.readouterr().out
    report = ["--report", "--document", "--output", str(output)]
    text = documented(script("report_serving"), "serving", lambda: script("serving").main(report))
    assert all(f"| {engine} |" in text for engine in ENGINES)


def test_an_engine_that_says_something_else_is_not_timed(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_diffkv import DiffKVConfig

    module = script("serving")
    monkeypatch.setattr(
        DiffKVConfig, "lossless", staticmethod(lambda: DiffKVConfig(alpha_high=99, alpha_low=9, window=2))
    )
    with pytest.raises(SystemExit, match="nothing is timed"):
        module.main([*OPTIONS, "--output", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "none.jsonl").exists()


def test_the_table_on_paper(script) -> None:
    """It equals the document's table; the dense line is computed by hand."""
    module = script("serving_on_paper")
    document = (Path(__file__).parents[2] / "docs" / "notes" / "serving.md").read_text()
    assert f"<!-- on paper -->\n{module.table(module.TOKENS)}\n<!-- end -->" in document
    # 32 layers of 8 heads of 128 elements, keys and values; weights of Llama-3-8B
    each, weights = 8448 * 32 * 8 * 128 * 2 * 2, 8_030_261_248 * 2
    requests = int((0.9 * 141e9 - weights) / each)
    seconds = (weights + requests * each) / (0.75 * 4.8e12)
    line = module.lines(8448)[0]
    assert line[:4] == ["H200, bf16 weights", "bf16", each / 1e6, requests]
    assert line[4] == pytest.approx(requests / seconds, rel=1e-3)
