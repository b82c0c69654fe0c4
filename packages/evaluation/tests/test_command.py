"""`hf-diffkv evaluate`: what it writes, what it says of bad input, and what an interrupt leaves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hf_diffkv_evaluation.commands.evaluate import _tasks
from invented import GOOD, TASK, Invented

from hf_diffkv.cli import INTERRUPTED, USAGE_ERROR, main
from hf_diffkv.evaluation import runner
from hf_diffkv.evaluation.tasks import suites

pytestmark = pytest.mark.usefixtures("invented")


def evaluate(output: Path, *options: str, tasks: str = TASK, methods: str = f"dense,{GOOD}") -> int:
    arguments = ["--model", "tiny-lm", "--tasks", tasks, "--methods", methods, "--output", str(output), *options]
    return main(["evaluate", *arguments])


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert evaluate(tmp_path / "run", "--documents", "2", "--length", "9", "--seed", "3") == 0
    names = ["invented-kl.png", "invented-right.png", "records.jsonl", "run.json", "table.md"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert [(record["method"], record["document"]) for record in records] == [
        (method, f"invented-{index}") for index in range(2) for method in ("dense", GOOD)
    ]
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {
        "model": "tiny-lm",
        "dtype": "bfloat16",
        "seed": 3,
    }
    table = (tmp_path / "run" / "table.md").read_text()
    assert f"| {GOOD} | 50.0% | - | 10 of 20 | 0.5000 |" in table
    said = capsys.readouterr().out
    assert table in said and "records.jsonl" in said.splitlines()[-1]


def test_quiet(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert evaluate(tmp_path, "--quiet") == 0
    said = capsys.readouterr()
    assert said.out.startswith("Wrote ") and len(said.out.splitlines()) == 1
    assert said.err == ""


def test_run_again_it_goes_on(tmp_path: Path) -> None:
    assert evaluate(tmp_path, "--documents", "1") == 0
    Invented.measured.clear()
    assert evaluate(tmp_path, "--documents", "2") == 0
    assert [name for _, name in Invented.measured] == ["invented-1", "invented-1"]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Invented.raising[GOOD, "invented-1"] = KeyboardInterrupt()
    assert evaluate(tmp_path) == INTERRUPTED == 130
    assert "interrupted" in capsys.readouterr().err
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3
    assert f"`{GOOD}` was run on 1 of 2 documents" in (tmp_path / "table.md").read_text()
    Invented.raising.clear()
    assert evaluate(tmp_path) == 0
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 6


def test_failures_are_retried_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Invented.raising[GOOD, "invented-1"] = RuntimeError("too big")
    assert evaluate(tmp_path) == 0
    assert f"- `{GOOD}` failed: RuntimeError: too big" in capsys.readouterr().out
    Invented.raising.clear()
    assert evaluate(tmp_path) == 0
    assert "too big" in capsys.readouterr().out
    assert evaluate(tmp_path, "--retry") == 0
    assert "failed" not in capsys.readouterr().out


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert evaluate(tmp_path) == 0
    assert "no plots: plots need matplotlib: pip install -e '.[plot]'" in capsys.readouterr().out
    assert (tmp_path / "table.md").exists() and not list(tmp_path.glob("*.png"))


def test_defaults_are_what_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """tiny-lm takes 4,096 tokens; what is asked for by name is refused instead."""
    taken: list[str] = []
    monkeypatch.setattr(runner, "run", lambda *args, **kwargs: taken.extend(task.name for task, _ in args[2]))
    arguments = ["evaluate", "--model", "tiny-lm", "--methods", "dense", "--output", str(tmp_path), "--documents", "1"]
    assert main(arguments) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("left out"))
    assert "the model takes only 4,096 tokens" in line
    left = re.findall(r"(\S+) \(([\d,]+)\)", line)
    assert "turns" in dict(left) and all(int(tokens.replace(",", "")) > 4096 for _, tokens in left)
    assert {*taken, *dict(left)} == {*suites()["offline"]} and "key-value" in taken
    for tasks in ("offline", "turns"):
        assert main([*arguments, "--tasks", tasks]) == USAGE_ERROR
        assert "but the model's max_position_embeddings is 4096" in capsys.readouterr().err


BAD = {
    "task": (["--tasks", "invnted"], "unknown task 'invnted': did you mean invented"),
    "tasks": (["--tasks", ","], "--tasks names nothing; see --list."),
    "method": (["--methods", "dense,diffvk"], "unknown method 'diffvk': did you mean diffkv"),
    "methods": (["--methods", ""], "--methods names nothing; see --list."),
    "option": (["--methods", "quanto:5"], "one of (2, 4)"),
    "documents": (["--documents", "0"], "'--documents': 0 is too few; give at least 1."),
    "length": (["--length", "-3"], "'--length': -3 is too few; give at least 1."),
    "short prompt": (["--tasks", "key-value", "--length", "50"], "too short for 12 facts; raise --length."),
    "long prompt": (["--length", "5000"], "needs 5000 tokens but the model's max_position_embeddings is 4096"),
    "new tokens": (["--max-new-tokens", "0"], "'--max-new-tokens': 0 is too few; give at least 1."),
    "long text": (["--tasks", "trajectory", "--max-new-tokens", "4096"], "lower --length or --max-new-tokens"),
    "harness": (["--tasks", "gsm8k"], "task 'gsm8k' is run by lm-evaluation-harness: hf-diffkv lm-eval --model"),
    "suite of the harness": (["--tasks", "ruler"], "--tasks ruler"),
    "submission": (["--submit", "a.json"], "--submit was removed; benchmarks/quality/peers.py has it."),
    "sampling": (["--sample"], "--sample was removed; tasks that generate are run by hf-diffkv lm-eval"),
    "batches": (["--batch-size", "2"], "--batch-size was removed; tasks that generate are run by hf-diffkv lm-eval"),
    "model": (["--model", "tinylm"], "did you mean 'tiny-lm'"),
    "folder": (["--model", "/nowhere/at/all"], "there is no folder '/nowhere/at/all'."),
    "device": (["--device", "mars"], "device mars cannot be used"),
    "output": (["--output", __file__], "cannot write to"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options, said = BAD[case]
    assert evaluate(tmp_path / "run", *options) == USAGE_ERROR == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("hf-diffkv: ") and said in line
    # nothing was begun
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert evaluate(tmp_path, "--device", "cuda:77") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-diffkv: device cuda:77 cannot be used: ")


def test_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert evaluate(tmp_path, "--documents", "1", "--quiet") == 0
    before = (tmp_path / "records.jsonl").read_bytes()
    capsys.readouterr()
    for options, said in (
        (["--seed", "1"], "seed=0, not 1"),
        (["--dtype", "float32"], "dtype='bfloat16', not 'float32'"),
        (["--max-new-tokens", "4"], "max_new_tokens=None, not 4"),
    ):
        assert evaluate(tmp_path, *options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line and "choose another --output" in line
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_damaged_records(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert evaluate(tmp_path, "--documents", "1", "--quiet") == 0
    (tmp_path / "records.jsonl").write_text("what is this\n")
    capsys.readouterr()
    assert evaluate(tmp_path, "--quiet") == 2
    assert "records.jsonl, line 1 is not a record of an evaluation." in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", "--list"]) == 0
    methods, *suites = capsys.readouterr().out.splitlines()
    assert {"dense", "diffkv", "leankv", "quanto"} <= set(methods.removeprefix("methods: ").split(", "))
    assert any(line.startswith("suite offline: dictionary, ") for line in suites)


def test_a_suite_is_its_tasks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Invented, "suites", ("mine",))
    names = [task.name for task in _tasks("text,offline,mine,dictionary")]
    assert names[0] == "text" and names[-1] == TASK
    assert sorted(names) == sorted([*suites()["offline"], TASK])
