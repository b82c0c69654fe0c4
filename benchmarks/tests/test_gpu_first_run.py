"""The first run on a GPU: whatever its parts do, the rest runs and every part leaves a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_fails_ends_its_part_alone(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    module = script("gpu_first_run")
    # the child of the hanging process keeps its output open
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    programs = {
        "tests": {"kernels": "print('seen'); raise SystemExit(3)", "models": hang, "graphs": "never started"},
        "attention": {"absent": None},
        "budget": {"decode_gpu": "import os; print(os.environ['PYTHONPATH'])"},
        "tables": {"tables": "print('the targets')"},
        "gpu_report": {"gpu_report": "print('the report')"},
    }

    def commands(name: str, args: object) -> dict[str, list[str]]:
        return {
            what: [str(tmp_path / "nowhere")] if program is None else [sys.executable, "-c", program]
            for what, program in programs[name].items()
        }

    monkeypatch.setattr(module, "commands", commands)
    monkeypatch.setitem(module.PARTS, "tests", module.Part(3, None))
    assert module.main(["--parts", "tests", "attention", "budget", "--results", str(tmp_path)]) == 1
    found = lines(tmp_path / "first_run_gpu.jsonl")
    assert [(row["part"], row["what"]) for row in found] == [
        (part, what) for part, programs_of_part in programs.items() for what in programs_of_part
    ]
    assert found[0]["failed"] == "exit status 3" and found[0]["last_lines"] == ["seen"]
    assert found[1]["failed"] == "out of time" and found[1]["seconds"] < 20
    assert found[2]["failed"] == "no time left to start it" and "nowhere" in found[3]["failed"]
    assert not [row for row in found[4:] if "failed" in row]
    printed = capsys.readouterr().out
    assert (
        str(ROOT) in printed
        and str(ROOT / "packages" / "evaluation") in printed
        and "- attention, absent: 0 s, " in printed
    )
    assert printed.index("- budget, decode_gpu") < printed.index("the targets") < printed.index("the report")


def test_minutes_are_shared_by_the_wanted_parts(script) -> None:
    module = script("gpu_first_run")
    args = SimpleNamespace(parts=["tests", "compaction"], minutes=4)
    assert module.limit_of("tests", args) == 240 * 400 / 490
    assert module.limit_of("tests", args) + module.limit_of("compaction", args) == pytest.approx(240)
    assert module.limit_of("tests", SimpleNamespace(minutes=None)) == 400


def test_all_parts_take_what_they_are_given(script, tmp_path: Path) -> None:
    """Each benchmark accepts its arguments, and all tests are among those that run."""
    module = script("gpu_first_run")
    assert sum(part.limit for part in module.PARTS.values()) <= 25 * 60
    assert list(module.PARTS)[:5] == ["tests", "attention", "budget", "first-token", "compaction"]
    files = [f"test_{name}_on_gpu.py" for name in " ".join(module.PARTS["tests"].arguments).split()]
    assert sorted(files) == sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
    assert files[0] == "test_kernels_on_gpu.py"
    # the test that measures the device's memory
    assert module.PARTS["tests"].arguments[-1] == "memory"
    threads = torch.get_num_threads()
    for part in module.PARTS.values():
        if part.script is not None:
            options = ["--tiny", "--device", "cpu", "--seconds", "0", "--output", str(tmp_path / "none.jsonl")]
            session = script(part.script).main([*part.arguments, *options])
            assert all(row["kind"] == "check" for row in session.rows)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_test_is_a_line(script, tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError('no device')\n"
        "def test_errs(broken): pass\n"
        "@pytest.mark.skip(reason='no GPU')\n"
        "def test_skips(): pass\n"
    )
    output = tmp_path / "results" / "tests_gpu.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_lines", "--lines", str(output), str(tests)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, check=False)
    found = lines(output)
    assert [row["outcome"] for row in found] == ["passed", "failed", "failed", "skipped"]
    assert "1 == 2" in found[1]["failed"] and "no device" in found[2]["failed"] and "failed" not in found[0]
