"""Benchmark behaviour specific to GPUs: graphs, turns, profiles, insufficient memory, and targets."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from fake_gpu import fake_gpu

LLAMA = ["--models", "llama-3-8b"]


def run(module, output: Path, *more: str) -> list[dict]:
    module.main(["--device", "cpu", "--repeats", "2", "--output", str(output), *more])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_turns_time_what_was_captured(script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock advances with events and operators, so that times and their differences are equal in every run."""
    fake_gpu(monkeypatch, script)
    measure = script("measure")
    args = measure.parser("about", "results").parse_args(["--device", "cpu", "--repeats", "3"])
    tensor = torch.zeros(4)

    def twice() -> None:
        tensor.add_(1)
        tensor.mul_(2)

    whole, part = measure.Session(args).time_all([twice, lambda: tensor.add_(1)])
    assert whole.captured and part.captured
    assert [whole.median, part.median] == pytest.approx([1.002e-3, 1.001e-3])


@pytest.mark.slow
def test_attention(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    gpu = fake_gpu(monkeypatch, script)
    sizes = ["--batches", "1", "--contexts", "96", "--window", "8", "--configs", "K8V4", "30/40/30"]
    rows = run(script("attention_gpu"), tmp_path / "attention_gpu.jsonl", *LLAMA, *sizes)
    dense = [row for row in rows if row["kind"] == "dense" and "failed" not in row]
    # an unsuitable backend is reported and the others continue
    assert {row["name"].split(",")[0] for row in rows if "failed" in row} == {"cudnn", "efficient"} and dense
    for row in rows[-2:]:
        assert row["kind"] == "compressed" and row["dtype"] == "bfloat16" and row["captured"]
        assert row["dense"] in {other["name"] for other in dense}
        assert row["speed_up"] == pytest.approx(row["dense_us"] / row["us"], rel=1e-2)
        assert (row["attend_us"], row["finish_us"]) == (16.0, 4.0)
    # both are replayed in turns after warm-up
    assert gpu.replayed[-10:] == [gpu.graphs - 2, gpu.graphs - 1] * 5
    script("tables").main(["--results", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| 0.2 |" in printed and "- not measured: kind dense, model llama-3-8b" in printed
    outcomes = [("a", "failed"), ("b", "passed"), ("c", "failed"), ("a", "passed")]
    lines = [json.dumps({"test": test, "outcome": outcome}) + "\n" for test, outcome in outcomes]
    (tmp_path / "tests_gpu.jsonl").write_text("".join(lines))
    script("gpu_report").main(["--results", str(tmp_path)])
    report = capsys.readouterr().out
    last = next(line for line in report.splitlines() if f"| {rows[-1]['name']} |" in line)
    assert report.startswith(f"### {rows[-1]['device']}\n") and f"torch {rows[-1]['torch']}" in report
    assert f"| {rows[-1]['speed_up']:.3g} | {rows[-1]['error']:.1g} |" in last and " % |" in last
    assert "- cudnn" in report and "1 failed, 2 passed" in report


def test_memory_that_does_not_suffice(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """Dense keys and values do not fit but compressed ones do; the results name what was not measured."""
    gpu = fake_gpu(monkeypatch, script)
    module = script("attention_gpu")
    gpu.free = 5e5
    monkeypatch.setattr(script("rows"), "needed_bytes", lambda *args: 1e5)
    sizes = ["--batches", "1", "--contexts", "160", "--configs", "K4V2"]
    first, last = run(module, tmp_path / "attention_gpu.jsonl", *LLAMA, *sizes)
    assert first["kind"] == "dense" and first["left_out"].endswith("0.0 GB are free")
    assert last["name"] == "K4V2" and "speed_up" not in last and last["us"] > 0
    script("tables").main(["--results", str(tmp_path)])
    assert "batch 1, context 160: needs 0.0 GB" in capsys.readouterr().out


@pytest.mark.slow
def test_no_memory_for_both(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Frees dense keys and values after their measurement if the compressed ones do not fit alongside them."""
    gpu = fake_gpu(monkeypatch, script)
    module = script("attention_gpu")
    measure_dense = module.measure_dense
    kept = []

    def note(*args: object):
        kept.append(measure_dense(*args))
        gpu.free = 1.0
        return kept[0]

    monkeypatch.setattr(module, "measure_dense", note)
    monkeypatch.setattr(script("rows"), "needed_bytes", lambda *args: gpu.free * (2 if kept[0].call else 0.5))
    sizes = ["--batches", "1", "--contexts", "96", "--window", "8", "--configs", "K8V4"]
    rows = run(module, tmp_path / "attention_gpu.jsonl", *LLAMA, *sizes)
    assert kept[0].call is None and "left_out" in rows[-1]


@pytest.mark.slow
def test_memory_manager_and_prompt(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    fake_gpu(monkeypatch, script)
    threads = torch.get_num_threads()
    rows = run(script("memory_manager_gpu"), tmp_path / "memory_manager_gpu.jsonl", "--tiny", "--cpu-bytes", "60000")
    torch.set_num_threads(threads)
    # the larger pool is not copied to the CPU
    assert [(row["kind"], "left_out" in row) for row in rows] == [
        ("device", False), ("cpu", False), ("cpu", True), ("device", False),
    ]  # fmt: skip
    assert rows[0]["kernels"]["attend_kernel"] == 80.0
    rows = run(script("prompt_gpu"), tmp_path / "prompt_gpu.jsonl", "--tiny", *LLAMA)
    found = [row for row in rows if row["kind"] in ("significance", "compressed past")]
    assert len(found) == 4 and all(row["captured"] and row["over_flash"] > 0 for row in found)
    assert [row["name"] for row in rows if "failed" in row] == ["cudnn", "cudnn"]
    script("tables").main(["--results", str(tmp_path), "--plots"])
    assert (tmp_path / "prompt_gpu.png").stat().st_size > 1000
    assert "of flash" in capsys.readouterr().out


@pytest.mark.slow
def test_decode(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    gpu = fake_gpu(monkeypatch, script)
    module = script("decode_gpu")
    name = "DiffKV 1/0, compiled"
    per_token = module.per_token

    class Missing:
        def __init__(self, **options: object) -> None:
            raise ImportError

    def warned(session, model, cache_name: str, cache, tokens: torch.Tensor, args) -> dict:
        if cache_name == name and tokens.shape == (1, 160):
            logging.getLogger("hf_diffkv").warning("not captured: %s", "why")
        return per_token(session, model, cache_name, cache, tokens, args)

    monkeypatch.setattr(script("models_gpu"), "QuantizedCache", Missing)
    monkeypatch.setattr(module, "per_token", warned)
    caches = ["--caches", "DynamicCache", name, "QuantizedCache"]
    rows = run(module, tmp_path / "decode_gpu.jsonl", "--tiny", *caches)
    assert [row["left_out"] for row in rows if "left_out" in row] == ["quanto is not installed", "hqq is not installed"]
    assert not [row for row in rows if "failed" in row]
    compressed = [row for row in rows if row.get("cache") == name]
    assert [(row["kind"], row.get("warnings")) for row in compressed] == [
        ("budget", None), ("length", None), ("length", ["not captured: why"]),
    ]  # fmt: skip
    assert gpu.profiles == 3
    for row in compressed:
        assert row["attention_share"] == 0.5 and row["kernels_us"] == 200 / 16
        assert row["finish_share"] == pytest.approx(1e-3 * 20 / 16 / row["ms_per_token"], rel=1e-2, abs=1e-5)
        assert 0 < row["compaction_us"]
        share = 1e-3 * row["compaction_us"] / row["ms_per_token"]
        assert row["compaction_share"] == pytest.approx(share, rel=1e-2, abs=1e-5)
    script("tables").main(["--results", str(tmp_path)])
    assert "not captured: why" in capsys.readouterr().out


def test_targets(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Made only from the result files; the worst case decides, and the newest result of a case counts."""
    about = dict.fromkeys(("driver", "torch", "triton", "transformers", "commit"), "1") | {"device": "H200"}
    case = about | {"kind": "compressed", "model": "m", "kv_heads": 8, "us": 9.0, "gb_per_s": 1.0, "error": 0.0}
    parts = {"attend_us": 9.0, "finish_us": 1.0}
    large = {"batch": 32, "context": 8192}
    attention = [
        about | large | {"kind": "fp8", "model": "m", "name": "FP8 here", "us": 8.0, "gb_per_s": 1.0, "error": 0.0},
        about | large | {"kind": "fp8", "model": "m", "name": "FP8 there", "us": 7.2, "gb_per_s": 1.0, "error": 0.0},
        case | large | {"name": "K4V2", "share_of_peak": 0.56, "speed_up": 2.9},
        case | {"name": "balanced", "batch": 1, "context": 4096, "speed_up": 0.9},
        case | {"name": "balanced", "batch": 1, "context": 2048, "speed_up": 0.1},
        case | parts | {"name": "K8V8", "batch": 32, "context": 8192, "share_of_peak": 0.5, "speed_up": 1.9},
        case | parts | {"name": "K8V8", "batch": 32, "context": 8192, "share_of_peak": 0.8, "speed_up": 1.9},
        case | parts | {"name": "K8V8", "batch": 64, "context": 8192, "share_of_peak": 0.71, "speed_up": 1.6},
        # too small for the target
        case | {"name": "K8V8", "batch": 8, "context": 8192, "share_of_peak": 0.1, "speed_up": 0.1},
        case | {"name": "K4V2", "batch": 1, "context": 131072, "share_of_peak": 0.1, "speed_up": 1.5},
    ]
    step = about | {"kind": "length", "batch": 1}
    held = about | {"kind": "budget", "context": 8192, "cache_bytes_allowed": 16, "ms_per_token": 1.0, "ms_mean": 1.0}
    decode = [
        step | {"cache": "StaticCache, compiled", "context": 1024, "ms_per_token": 10.0},
        step | {"cache": "StaticCache, compiled", "context": 4096, "ms_per_token": 11.0},
        step | {"cache": "DiffKV 1/0", "context": 1024, "ms_per_token": 10.9, "compaction_share": 0.02},
        step | {"cache": "DiffKV 1/0", "context": 4096, "ms_per_token": 11.1, "compaction_share": 0.01},
        step | {"cache": "DiffKV 1/0, compiled", "context": 4096, "ms_per_token": 1.0, "warnings": ["why"]},
        # StaticCache takes 10 + (x - 1024) / 3072 ms a step, which is equal at 2,560 tokens
        step | {"cache": "DiffKV balanced", "context": 1024, "ms_per_token": 10.5, "finish_share": 0.05},
        step | {"cache": "DiffKV balanced", "context": 4096, "ms_per_token": 10.5, "finish_share": 0.09},
        step | {"cache": "DiffKV paper", "context": 1024, "ms_per_token": 10.5},
        step | {"cache": "DiffKV paper", "context": 4096, "ms_per_token": 12.5},
        held | {"cache": "DynamicCache", "batch": 10, "tokens_per_second": 100.0},
        held | {"cache": "DiffKV balanced", "batch": 40, "tokens_per_second": 510.0},
        held | {"cache": "DiffKV paper", "batch": 40, "tokens_per_second": 490.0},
    ]
    first = about | {"kind": "first token", "batch": 1, "ms": 1.0}
    ttft = [
        first | {"cache": "DynamicCache, sdpa, flash", "context": 1024},
        first | {"cache": "DiffKV balanced", "context": 1024, "over_dense": 1.2},
        first | {"cache": "DiffKV balanced", "context": 8192, "over_dense": 1.3},
    ]
    way = about | {"kind": "significance", "model": "m", "us": 1.0}
    prompt = [
        way | {"name": "all queries", "context": 8192, "over_flash": 1.3},
        way | {"name": "last 64 queries", "context": 8192, "over_flash": 1.2},
        way | {"name": "all queries", "context": 2048, "over_flash": 9.0},
    ]
    for name, rows in {"attention": attention, "decode": decode, "prompt": prompt, "ttft": ttft}.items():
        (tmp_path / f"{name}_gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script("tables").main(["--results", str(tmp_path)])
    printed = capsys.readouterr().out.split("## Targets, H200")[1]
    lines = {
        line.split(" | ")[0][2:]: line.strip("| ").split(" | ")[1:] for line in printed.splitlines() if "|" in line
    }
    assert lines["merging and keeping scores, of a captured step"][1] == "0.09"
    ahead = "tokens from which on a step is faster than StaticCache's"
    assert lines[f"DiffKV balanced: {ahead}"][1] == "2560" and lines[f"DiffKV balanced: {ahead}"][-1] == "no"
    assert lines[f"DiffKV paper: {ahead}"][1] == "inf"
    equal = "tokens per second, of DynamicCache's with as many bytes"
    assert lines[f"DiffKV balanced: {equal}"][1] == "5.1" and lines[f"DiffKV balanced: {equal}"][-1] == "yes"
    assert lines[f"DiffKV paper: {equal}"][1] == "4.9" and lines[f"DiffKV paper: {equal}"][-1] == "no"
    one = "first token, of the best dense prompt's time"
    assert lines[f"DiffKV balanced: {one}"][1] == "1.3" and lines[f"DiffKV paper: {one}"][-1] == "not measured"
    large = "256 or more rows, 8k or more tokens"
    where = "model m, name K8V8, batch 64, context 8192"
    assert lines[f"K8V8: share of peak, {large}"] == ["at least 0.7", "0.71", where, "0.8", "2", "yes"]
    assert lines[f"K8V8: speed-up, {large}"] == ["at least 1.7", "1.6", where, "1.9", "2", "no"]
    where = "model m, name K4V2, batch 32, context 8192"
    assert lines[f"K4V2: speed-up, {large}"][1:] == ["2.9", where, "2.9", "1", "no"]
    # the faster FP8 cache counts
    assert lines[f"K4V2: speed-up over FP8 KV, {large}"][1] == "0.8"
    assert lines["every precision: speed-up, batch 1, from 4k on"][1] == "0.9"
    assert lines[f"K8V4: speed-up, {large}"][-1] == "not measured"
    assert lines["K4V2: speed-up, batch 1, 128k"][-1] == "yes"
    assert lines[f"merging and keeping scores, of attention, {large}"][-2:] == ["2", "yes"]
    assert lines["compaction, of a captured step"][1] == "0.02" and lines["compaction, of a captured step"][-1] == "no"
    assert lines["DiffKV 1/0: step, of StaticCache's, 1k"][-1] == "yes"
    assert lines["DiffKV 1/0: step, of StaticCache's, from 4k on"][-1] == "no"
    assert lines["DiffKV 1/0, compiled: step, of StaticCache's, from 4k on"][-1] == "not measured"
    assert lines["prompt, all queries: over flash attention, from 8k on"][-1] == "yes"
    assert lines["prompt, newest queries: over flash attention, from 8k on"][-1] == "no"
