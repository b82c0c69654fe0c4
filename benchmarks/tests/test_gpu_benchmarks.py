"""The GPU benchmarks at tiny size on a CPU: they run, check what they time, and produce tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from transformers import StaticCache

from hf_diffkv import DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.running.models import TINY_LM


def run(module: ModuleType, output: Path, *more: str) -> list[dict]:
    threads = torch.get_num_threads()
    module.main(["--device", "cpu", "--tiny", "--repeats", "2", "--output", str(output), *more])
    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    absent = [row for row in rows if "not installed" in row.get("left_out", "")]
    rows = [row for row in rows if row not in absent]
    assert all(row["name"].endswith(("FlashInfer", "FlashAttention-3", "vLLM, Triton")) for row in absent)
    assert not [row for row in rows if "failed" in row or "left_out" in row], rows
    assert all(row["torch"] == torch.__version__ and "commit" in row for row in rows)
    return rows


@pytest.mark.slow
def test_attention(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module = script("attention_gpu")
    rows = run(module, tmp_path / "attention_gpu.jsonl", "--models", "llama-3-8b", "--commit", "abc123")
    assert {row["commit"] for row in rows} == {"abc123"}
    assert [row["name"] for row in rows if row["kind"] == "compressed"] == list(module.CONFIGS)
    assert all(row["error"] < 1e-4 and row["us"] > 0 and row["speed_up"] > 0 for row in rows if "speed_up" in row)
    # the same tokens use fewer bytes at fewer bits
    sizes = {row["name"]: row["bytes"] for row in rows if row["kind"] == "compressed"}
    (converted,) = (row for row in rows if row["kind"] == "fp8 converted")
    (alone,) = (row for row in rows if row["kind"] == "read")
    # float32 and FP8
    assert alone["bytes"] == 4 * converted["bytes"]
    assert sizes["FP16"] > sizes["K8V8"] > sizes["K8V4"] > sizes["K4V2"] > sizes["30/40/30"] / 2
    script("tables").main(["--results", str(tmp_path), "--plots"])
    assert "| 30/40/30 |" in capsys.readouterr().out
    assert (tmp_path / "attention_gpu.png").stat().st_size > 1000


def test_settings_of_the_kernel(
    script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    module, sweep, attend = script("attention_gpu"), script("sweep"), script("rows").RandomRows.attend
    seen = set()

    def note(rows: object, query: torch.Tensor, scratch: object) -> torch.Tensor:
        config = scratch.config
        setting = (config.block, config.num_warps, config.num_stages, dict(config.options).get("maxnreg"))
        seen.add((len(query), *setting, scratch.splits))
        return attend(rows, query)

    monkeypatch.setattr(script("rows").RandomRows, "attend", note)
    rows = run(module, tmp_path / "attention_gpu.jsonl", "--sweep")
    names = ("batch", "block", "num_warps", "num_stages", "maxnreg", "splits")
    assert {tuple(row.get(name) for name in names) for row in rows} == seen
    assert len(rows) == len(sweep.SETTINGS) * len(sweep.SWEPT)
    assert {setting[1:5] for setting in seen} == set(sweep.SETTINGS)
    script("tables").main(["--results", str(tmp_path)])
    assert "| 32 | 1 | 3 | 168 |" in capsys.readouterr().out


def test_splits_of_one_request(script, tmp_path: Path) -> None:
    """Settings stay as shipped, and rows are split into the default number of splits, half of it, and a quarter."""
    module, sweep, rows = script("attention_gpu"), script("sweep"), script("rows").RandomRows
    session = script("measure").Session(
        SimpleNamespace(device="cpu", repeats=1, output=tmp_path / "one.jsonl", commit=None, seconds=60)
    )
    query = torch.randn(1, 4, 32)
    case = {"model": "llama-3-8b", "kv_heads": 2, "batch": 1, "context": 1100, "window": 8, "dtype": "float32"}
    seen = []

    def check(output: torch.Tensor, found: rows) -> float:
        seen.append(output)
        return module.check(output, query, found.dense, 2)

    sweep.sweep(session, case, "K8V4", query, 2, check, 1e-3)
    splits = [row["splits"] for row in session.rows]
    assert len(seen) == 3 and splits == [splits[0], splits[0] // 2, splits[0] // 4] and splits[-1] > 0
    assert len({(row["block"], row["num_warps"]) for row in session.rows}) == 1


def test_a_setting_that_fails_is_a_line(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, attend = script("attention_gpu"), script("rows").RandomRows.attend

    def refuse(rows: object, query: torch.Tensor, scratch: object) -> torch.Tensor:
        if scratch.config.block == 16:
            raise MemoryError("out of resource: shared memory")
        return attend(rows, query) * (scratch.config.num_stages == 2)

    monkeypatch.setattr(script("rows").RandomRows, "attend", refuse)
    output = tmp_path / "attention_gpu.jsonl"
    session = module.main(["--device", "cpu", "--tiny", "--sweep", "--repeats", "2", "--output", str(output)])
    mine = [row for row in session.rows if row["name"] == "K4V2"]
    assert [row["failed"] for row in mine if row["block"] == 16] == ["MemoryError: out of resource: shared memory"] * 2
    wrong = [row["failed"] for row in mine if row["num_stages"] == 3 and row["block"] > 16]
    assert len(wrong) == 5 and all("relative error 1" in each for each in wrong)
    assert all(row["us"] > 0 for row in mine if row["num_stages"] == 2 and row["block"] > 16)


def test_a_wrong_output_is_not_timed(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("attention_gpu")
    monkeypatch.setattr(module.RandomRows, "attend", lambda rows, query, **kwargs: torch.zeros_like(query))
    output = tmp_path / "wrong.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--models", "llama-3-8b", "--configs", "K8V4", "--output", str(output)]
    session = module.main(arguments)
    (row,) = [row for row in session.rows if row["kind"] == "compressed"]
    assert "relative error 1" in row["failed"] and "us" not in row


def test_memory_manager(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = run(script("memory_manager_gpu"), tmp_path / "memory_manager_gpu.jsonl")
    assert [(row["kind"], row["batch"]) for row in rows] == [("device", 1), ("cpu", 1), ("device", 2), ("cpu", 2)]
    assert all(row["us"] > 0 for row in rows)
    script("tables").main(["--results", str(tmp_path), "--plots"])
    assert "CPU / device" in capsys.readouterr().out
    assert (tmp_path / "memory_manager_gpu.png").stat().st_size > 1000


def test_memory_manager_compares_both_sides(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = script("memory_manager_gpu")
    made = module.make_round

    def damaged(*args: object, **kwargs: object) -> object:
        step = made(*args, **kwargs)
        monkeypatch.setattr(step, "run", lambda: step.rows.held.high_count.add_(7))
        return step

    monkeypatch.setattr(module, "make_round", damaged)
    output = tmp_path / "damaged.jsonl"
    session = module.main(["--device", "cpu", "--tiny", "--batches", "1", "--output", str(output)])
    assert session.rows and all("differs" in row["failed"] for row in session.rows)


def test_prompt(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = run(script("prompt_gpu"), tmp_path / "prompt_gpu.jsonl", "--models", "llama-3-8b")
    kinds = ["check", "dense", *["significance"] * 2, "dense past", *["compressed past"] * 2]
    assert [row["kind"] for row in rows] == kinds
    assert len(rows[0]["errors"]) == 4
    assert all(row["over_dense"] > 0 for row in rows if row["kind"] in ("significance", "compressed past"))
    script("tables").main(["--results", str(tmp_path)])
    assert "of the best dense" in capsys.readouterr().out


@pytest.mark.slow
def test_latents(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """All variants match the float32 output; fewer bits give larger errors."""
    module = script("latent_gpu")
    rows = run(module, tmp_path / "latent_gpu.jsonl", "--shapes", "deepseek")
    errors = {row["cache"]: row["error"] for row in rows}
    assert list(errors)[:2] == ["DynamicCache", "absorbed, exact latents"] and max(list(errors.values())[:3]) < 1e-4
    assert 1e-4 < errors["DiffKV K8V8"] < errors["DiffKV K8V6"] < errors["DiffKV K8V4"] < module.LIMIT
    script("tables").main(["--results", str(tmp_path)])
    assert "| deepseek | 2 | 160 | DiffKV K8V4 |" in capsys.readouterr().out


@pytest.mark.slow
def test_first_tokens(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module = script("ttft_gpu")
    rows = run(module, tmp_path / "ttft_gpu.jsonl")
    assert [row["cache"] for row in rows] == ["DynamicCache, sdpa, math", *module.CACHES]
    dense, *others = rows
    assert all(row["over_dense"] == pytest.approx(row["ms"] / dense["ms"], rel=1e-2) for row in others)
    assert [row["config"]["high"]["k_bits"] for row in others] == [5, 8, 4, 8]
    script("tables").main(["--results", str(tmp_path)])
    assert "| DiffKV balanced: first token, of the best dense" in capsys.readouterr().out


def test_an_attention_that_is_not_there_is_a_line(script, tmp_path: Path) -> None:
    module = script("ttft_gpu")
    options = ["--device", "cpu", "--tiny", "--caches", "DiffKV balanced", "--output", str(tmp_path / "ttft_gpu.jsonl")]
    args = module.parser("", "ttft_gpu").parse_args(options[:3] + options[-2:])
    args.dense, args.caches, args.turns = ["flash_attention_3"], ["DiffKV balanced"], 2
    session = module.Session(args)
    module.measure(session, module.build_model(session, True), 96, args)
    dense, row = session.rows
    assert "failed" in dense and dense["cache"] == "DynamicCache, flash_attention_3"
    assert row["ms"] > 0 and "over_dense" not in row


@pytest.mark.slow
def test_decode(script, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["DynamicCache", "StaticCache", "DiffKV 1/0"]
    rows = run(script("decode_gpu"), tmp_path / "decode_gpu.jsonl", "--caches", *names)
    assert rows[0]["lossless_error"] < 1e-4
    lengths = [row for row in rows if row["kind"] == "length"]
    budgets = [row for row in rows if row["kind"] == "budget"]
    assert len(lengths) == 2 * len(budgets) == 2 * len({row["cache"] for row in lengths})
    assert {"DiffKV 1/0", "DiffKV 1/0, compiled", "DiffKV 1/0, not captured"} < {row["cache"] for row in lengths}
    assert all(row["warm_up_seconds"] > 0 for row in lengths)
    assert all(row["config"]["alpha_high"] == 1 for row in lengths + budgets if row["cache"].startswith("DiffKV"))
    assert all((row["compaction_us"] != 0) == row["cache"].startswith("DiffKV") for row in lengths if "ratio" in row)
    # with equal bytes, more requests fit if the cache is compressed
    batches = {row["cache"]: row["batch"] for row in budgets}
    assert batches["DiffKV 1/0"] >= batches["DynamicCache"] > 1
    script("tables").main(["--results", str(tmp_path), "--plots"])
    printed = capsys.readouterr().out
    assert "tokens per second" in printed and "DynamicCache: " in printed
    assert (tmp_path / "decode_gpu.png").stat().st_size > 1000


def test_a_lossy_cache_is_not_timed(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("decode_gpu")
    monkeypatch.setattr(DiffKVConfig, "lossless", lambda: DiffKVConfig(alpha_high=1e9, alpha_low=0.0))
    with pytest.raises(SystemExit, match="nothing timed"):
        module.main(["--device", "cpu", "--tiny", "--output", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "none.jsonl").exists()


def test_lean_attention_is_the_models_own(script) -> None:
    """Compares the logits of a prompt and of steps, for a model with grouped queries."""
    lean = script("lean")
    lean.register()
    model = tiny_model("llama")
    tokens, found = torch.randint(0, 96, (2, 9)), {}
    for attention in ("eager", lean.LEAN):
        model.set_attn_implementation(attention)
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            parts = [model(part, **passing(cache)).logits for part in tokens.split([7, 1, 1], dim=1)]
        found[attention] = torch.cat(parts, dim=1)
    torch.testing.assert_close(found[lean.LEAN], found["eager"])


def test_a_line_through_points(script) -> None:
    module = script("lengths")
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


def test_serving(script, tmp_path: Path) -> None:
    """Both engines answer all requests within the same bytes."""
    module = script("serving_gpu")
    rows = run(module, tmp_path / "serving_gpu.jsonl", "--requests", "8", "--cache-bytes", "1e6")
    assert [row["cache"] for row in rows] == list(module.NAMES[:2])
    assert all(0 < row["bytes"] <= 1_000_000 and row["tokens_per_second"] > 0 for row in rows)


def test_losses_of_a_trained_model(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("trained_gpu")
    for name, tokens in (("LENGTH", 300), ("MORE", 20), ("STEPS", 6)):
        monkeypatch.setattr(module, name, tokens)
    rows = run(module, tmp_path / "trained_gpu.jsonl", "--model", str(TINY_LM), "--documents", "1")
    found = {row["cache"].removeprefix("DiffKV "): row for row in rows}
    assert set(found) == {"DynamicCache, eager", *module.PRESETS}
    # bfloat16 rounds more than lossless storage changes
    assert found["lossless"]["kl_steps"] < 0.001 < found["small"]["kl_steps"] < 1
    sizes = [found[name]["share_of_bytes"] for name in ("lossless", "quality", "balanced", "small")]
    assert sizes == sorted(sizes, reverse=True)
