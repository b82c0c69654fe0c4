"""The GPU benchmarks at tiny size on a CPU: that they run, check what they time, and that tables are made of it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in ("measure", "rows", "tables", "attention_gpu", "memory_manager_gpu", "prompt_gpu", "decode_gpu"):
        sys.modules.pop(name, None)


def run(module: ModuleType, output: Path, *more: str) -> list[dict]:
    threads = torch.get_num_threads()
    module.main(["--device", "cpu", "--tiny", "--repeats", "2", "--output", str(output), *more])
    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert not [row for row in rows if "failed" in row], rows
    assert all(row["torch"] == torch.__version__ and "commit" in row for row in rows)
    return rows


def test_attention(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module = script("attention_gpu")
    rows = run(module, tmp_path / "attention_gpu.jsonl", "--models", "llama-3-8b", "--commit", "abc123")
    assert {row["commit"] for row in rows} == {"abc123"}
    assert [row["name"] for row in rows if row["kind"] == "compressed"] == list(module.CONFIGS)
    assert all(row["error"] < 1e-4 and row["us"] > 0 and row["speed_up"] > 0 for row in rows if "speed_up" in row)
    # the same tokens take fewer bytes at fewer bits
    sizes = {row["name"]: row["bytes"] for row in rows if row["kind"] == "compressed"}
    assert sizes["FP16"] > sizes["K8V8"] > sizes["K8V4"] > sizes["K4V2"] > sizes["30/40/30"] / 2
    script("tables").main(["--results", str(tmp_path), "--plots"])
    assert "| 30/40/30 |" in capsys.readouterr().out
    assert (tmp_path / "attention_gpu-llama-3-8b.png").stat().st_size > 1000


def test_a_wrong_output_is_not_timed(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("attention_gpu")
    monkeypatch.setattr(module.Rows, "attend", lambda rows, query, **kwargs: torch.zeros_like(query))
    output = tmp_path / "wrong.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--models", "llama-3-8b", "--configs", "K8V4", "--output", str(output)]
    session = module.main(arguments)
    assert not [row for row in session.rows if row.get("kind") == "compressed"]
    assert "relative error 1" in [row for row in session.rows if "failed" in row][0]["error"]


def test_memory_manager(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = run(script("memory_manager_gpu"), tmp_path / "memory_manager_gpu.jsonl")
    assert [(row["kind"], row["batch"]) for row in rows] == [("device", 1), ("cpu", 1), ("device", 2), ("cpu", 2)]
    assert all(row["us"] > 0 for row in rows)
    script("tables").main(["--results", str(tmp_path)])
    assert "CPU / device" in capsys.readouterr().out


def test_memory_manager_compares_both_sides(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = script("memory_manager_gpu")
    made = module.make_round

    def damaged(*args: object, **kwargs: object) -> object:
        step = made(*args, **kwargs)
        monkeypatch.setattr(step, "run", lambda: step.rows.high_count.add_(7))
        return step

    monkeypatch.setattr(module, "make_round", damaged)
    output = tmp_path / "damaged.jsonl"
    session = module.main(["--device", "cpu", "--tiny", "--batches", "1", "--output", str(output)])
    assert all("differs" in row["error"] for row in session.rows)


def test_prompt(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = run(script("prompt_gpu"), tmp_path / "prompt_gpu.jsonl", "--models", "llama-3-8b")
    kinds = ["check", "dense", *["significance"] * 2, "dense past", *["compressed past"] * 2]
    assert [row["kind"] for row in rows] == kinds
    assert len(rows[0]["errors"]) == 4
    assert all(row["over_dense"] > 0 for row in rows if row["kind"] in ("significance", "compressed past"))
    script("tables").main(["--results", str(tmp_path)])
    assert "of the best dense" in capsys.readouterr().out


def test_decode(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["DynamicCache", "StaticCache", "DiffKV 1/0"]
    rows = run(script("decode_gpu"), tmp_path / "decode_gpu.jsonl", "--caches", *names)
    assert rows[0]["lossless_error"] < 1e-4
    kinds = [row["kind"] for row in rows[1:]]
    assert kinds.count("length") == 2 * kinds.count("line") == 2 * kinds.count("budget") > 0
    found = {row["cache"] for row in rows if row["kind"] == "length"}
    assert {"DiffKV 1/0", "DiffKV 1/0, compiled", "DiffKV 1/0, not captured"} < found
    assert all(row["warm_up_seconds"] > 0 for row in rows if row["kind"] == "length")
    # a longer cache of the same bytes has room for more requests where it is compressed
    batches = {row["cache"]: row["batch"] for row in rows if row["kind"] == "budget"}
    assert batches["DiffKV 1/0"] >= batches["DynamicCache"] > 1
    script("tables").main(["--results", str(tmp_path), "--plots"])
    assert "tokens per second" in capsys.readouterr().out
    assert (tmp_path / "decode_gpu.png").stat().st_size > 1000


def test_a_line_through_points(script) -> None:
    module = script("decode_gpu")
    slope, intercept = module.fit([(1000, 3.0), (2000, 4.0), (4000, 6.0)])
    assert abs(slope - 0.001) < 1e-12 and abs(intercept - 2.0) < 1e-9
    assert module.break_even((0.001, 4.0), (0.002, 2.0)) == 2000.0
    assert module.break_even((0.002, 4.0), (0.001, 2.0)) is None
    assert module.break_even((0.001, 1.0), (0.002, 2.0)) == 0.0


def test_nothing_starts_without_time(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script("attention_gpu").main(
        ["--device", "cpu", "--tiny", "--seconds", "0", "--output", str(tmp_path / "none.jsonl")]
    )
    assert "skipped, out of time" in capsys.readouterr().out
    assert not (tmp_path / "none.jsonl").exists()
