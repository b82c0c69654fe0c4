"""Comparing stacks on a CPU: turns with stand-ins for the workers, the Transformers worker, and the tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

STAND_IN = """
import sys, time
sys.path.insert(0, {folder!r})
from stack_protocol import serve

class StandIn:
    def __init__(self, job):
        self.name, self.taken = job["cache"], 0
        print("a library prints this")

    def read(self, ids):
        if {dies!r} == self.name and len(ids) == 1:
            sys.exit(3)
        with open({log!r}, "a") as log:
            log.write(f"{{self.name}} {{','.join(map(str, ids))}}\\n")
        self.taken += len(ids)
        return 7

    def held(self):
        return 10 * self.taken

    def about(self):
        return {{"python": "3"}}

serve(StandIn)
"""


@pytest.fixture
def stack(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with processes replaced by stand-ins that log what they are sent; the one that `dies` names exits."""
    module = script("cpu_stack")
    module.log, module.dies = tmp_path / "log", ""

    def command(competitor: object) -> list[str]:
        names = {"folder": str(Path(module.__file__).parent), "log": str(module.log), "dies": module.dies}
        return [sys.executable, "-c", STAND_IN.format(**names)]

    monkeypatch.setattr(module, "command_of", command)
    monkeypatch.setattr(module, "gguf_of", lambda model: Path("model.gguf"))
    monkeypatch.setattr(module, "ids_of", lambda model, count: list(range(count)))
    monkeypatch.setattr(module, "PAUSE", 0)
    return module


def run(stack: ModuleType, output: Path, *options: str) -> list[dict]:
    sizes = ["--models", "m", "--tokens", "5", "--turns", "2", "--steps", "2", "--threads", "1"]
    stack.main([*sizes, "--output", str(output), *options])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_all_read_one_prompt_and_take_the_same_tokens_in_turns(stack: ModuleType, tmp_path: Path) -> None:
    rows = run(stack, tmp_path / "rows.jsonl", "--weights", "bfloat16", "GGUF", "--caches", "balanced", "q8_0")
    prompts = ["balanced 0,1,2,3,4", "q8_0 0,1,2,3,4"]
    first = [f"{name} {token}" for name in ("balanced", "q8_0") for token in (5, 6, 7)]
    # the other one starts the second turn
    second = [f"{name} {token}" for name in ("q8_0", "balanced") for token in (8, 9, 10)]
    assert stack.log.read_text().splitlines() == prompts + first + second
    assert [(row["stack"], row["cache"]) for row in rows] == [("Transformers", "balanced"), ("llama.cpp", "q8_0")]
    for row in rows:
        assert (row["model"], row["tokens"], row["threads"], row["next"]) == ("m", 5, 1, 7)
        # the first of the three in each turn is not timed
        assert row["steps"] == 4 and 0 < row["step_min_ms"] <= row["step_ms"]
        assert (
            row["cache_bytes"] == 110
            and row["peak_bytes"] > 1 << 20 < row["loading_peak_bytes"]
            and row["prompt_seconds"] >= 0
        )
        assert row["commit"] and row["device"]


def test_what_is_measured_is_left_out(stack: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "rows.jsonl"
    assert len(run(stack, output, "--caches", "q8_0")) == 1
    assert len(run(stack, output, "--caches", "q8_0")) == 1
    assert "m, 5 tokens: measured already" in capsys.readouterr().out
    # all stacks of a case are timed together
    assert len(run(stack, output, "--caches", "q8_0", "q4_0")) == 3
    assert len(run(stack, output, "--caches", "q8_0", "--again")) == 4
    lines = output.read_text().splitlines()
    output.write_text("".join(json.dumps({**json.loads(line), "commit": "another"}) + "\n" for line in lines))
    assert len(run(stack, output, "--caches", "q8_0")) == 5


def test_a_process_that_ends_is_named(stack: ModuleType, tmp_path: Path) -> None:
    stack.dies = "q4_0"
    with pytest.raises(SystemExit, match="the process of GGUF, q4_0 ended with exit code 3"):
        run(stack, tmp_path / "rows.jsonl", "--caches", "q8_0", "q4_0")
    assert not (tmp_path / "rows.jsonl").exists()


def test_what_is_missing_is_said(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("cpu_stack")
    llama = module.Competitor("llama.cpp", "GGUF", "f16")
    monkeypatch.setattr(module, "MODELS_FOLDER", tmp_path)
    with pytest.raises(SystemExit, match="make models MODELS=m GGUF=1"):
        llama.job("m", 10, 1)
    monkeypatch.setattr(module, "LLAMA_PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit, match="make llama-cpp"):
        module.command_of(llama)
    with pytest.raises(SystemExit, match="give fewer --tokens"):
        module.ids_of("tiny-lm", 10**7)


@pytest.mark.parametrize("cache", ["DynamicCache", "balanced head_precisions=null"])
def test_the_worker_of_transformers_continues_a_prompt(script, cache: str) -> None:
    """tiny-lm answers a fact of the prompt, one token at a time."""
    module = script("stack_torch")
    tokenizer = script("cpu_stack").load_config("tiny-lm")[1]
    prompt = Path(__file__).parents[2] / "examples" / "prompts" / "recall.txt"
    ids = tokenizer(prompt.read_text().strip()).input_ids
    runtime = module.Transformers({"model": "tiny-lm", "weights": None, "cache": cache, "threads": 1})
    answer = [runtime.read(ids)]
    for _ in range(3):
        answer.append(runtime.read(answer[-1:]))
    assert tokenizer.decode(answer) == "9082"
    assert runtime.cache.get_seq_length() == len(ids) + 3
    assert runtime.held() > 0 and runtime.about()["torch"]


def row(tokens: int, cache: str, step_ms: float, **others: object) -> dict:
    stack = "llama.cpp" if cache == "f16" else "Transformers"
    made = {"kind": "stack", "device": "cpu", "threads": 2, "model": "m", "tokens": tokens, "stack": stack}
    made |= {"weights": "Q4_K_M" if cache == "f16" else "4bit", "cache": cache, "step_ms": step_ms, "commit": "abc"}
    made |= {"step_min_ms": step_ms, "step_deviation_ms": 0.5, "prompt_seconds": 12.4, "peak_bytes": 1_234_000_000}
    made |= {"loading_peak_bytes": 2_000_000_000}
    return {**made, "cache_bytes": None, **others}


def test_the_newest_of_a_case_counts_and_tables_are_by_length(script, tmp_path: Path) -> None:
    report = script("stack_report")
    path = tmp_path / "rows.jsonl"
    rows = [
        row(4096, "f16", 30.4),
        row(256, "balanced", 20.2),
        row(4096, "balanced", 99.0),
        row(4096, "balanced", 21.6),
    ]
    rows.append(row(4096, "balanced", 50.0, model="another"))
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = report.read(path)
    assert len(found) == 4
    text = "<!-- cpu_stack: m 256,4096 balanced;f16 -->\nold\n<!-- end -->\n"
    assert report.filled(text, found).splitlines() == [
        "<!-- cpu_stack: m 256,4096 balanced;f16 -->",
        "| weights, cache | 256 | 4,096 | prompt of 4,096, s | peak at 4,096, MB |",
        "|---|---|---|---|---|",
        "| Q4_K_M, f16 | - | 30 | 12 | 1,234 |",
        "| 4bit, balanced | 20 | 22 | 12 | 1,234 |",
        "<!-- end -->",
    ]
    # prompts and peaks are compared at a length that all have
    lines = report.overview(
        [*found, row(8192, "balanced", 31.0)], "m", [256, 4096, 8192], ["balanced", "f16"]
    ).splitlines()
    assert lines[0] == "| weights, cache | 256 | 4,096 | 8,192 | prompt of 4,096, s | peak at 4,096, MB |"
    assert lines[2:] == ["| Q4_K_M, f16 | - | 30 | - | 12 | 1,234 |", "| 4bit, balanced | 20 | 22 | 31 | 12 | 1,234 |"]
    assert "| Transformers | 4bit | balanced | 4,096 | 21.6 | 21.6 | 0.5 | 12.4 | 1,234 | 2,000 | - |" in report.table(
        found
    )
    assert report.table([]) == "nothing was measured"


def test_the_documents_have_the_tables_of_the_results(script) -> None:
    module, report = script("cpu_stack"), script("stack_report")
    for document in report.DOCUMENTS:
        text = document.read_text()
        assert len(report.BLOCK.findall(text)) == text.count("<!-- cpu_stack: ") > 0
        # a table without its end marker would swallow the next one
        assert text.count("<!-- end -->") == len(re.findall(r"<!-- (cpu_stack|study|field): ", text))
        made = report.filled(text, report.read(module.RESULTS))
        assert text == made, "python benchmarks/cpu_stack.py --table --document"


def test_steps_alone_leave_out_prompts_and_peaks(script) -> None:
    report = script("stack_report")
    text = "a\n<!-- cpu_stack: m 256,4096 balanced steps -->\nold\n<!-- end -->\nb"
    lines = ["| weights, cache | 256 | 4,096 |", "|---|---|---|", "| 4bit, balanced | 20 | 22 |", "<!-- end -->", "b"]
    rows = [row(256, "balanced", 20.0), row(4096, "balanced", 22.0)]
    assert report.filled(text, rows).splitlines()[2:] == lines
