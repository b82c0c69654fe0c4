"""Methods in a separate environment, which is faked here: this Python, with another method of that name."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hf_diffkv_evaluation import report

from hf_diffkv.evaluation.runner import documents_of
from hf_diffkv.evaluation.tasks import get_task, suites
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.running.models import CHECKOUT

PRESS = "kvpress:snapkv+0.5"
# a process of `worker.py` whose kvpress is a dense cache
WORKER = """
    sys.path.insert(0, os.path.dirname(sys.argv[1]))
    import methods, worker
    from hf_diffkv.evaluation.methods import METHODS
    METHODS.names()
    METHODS._entries["kvpress"] = lambda options: METHODS.find("dense")([])
    sys.exit(worker.main())
"""


@pytest.fixture
def environment(isolated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the environment kvpress, whose Python runs a given program whatever the request."""
    monkeypatch.setattr(isolated, "ENVIRONMENTS", tmp_path / "envs")
    # plots, which take longer than everything else
    monkeypatch.setattr(report, "plot_tasks", lambda records, folder: [])
    folder = tmp_path / "envs" / "kvpress"

    def make(program: str) -> Path:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        script = folder / "worker.py"
        script.write_text("import os, sys, time\n" + textwrap.dedent(program))
        python = folder / "bin" / "python"
        # its arguments are part of what the tests examine
        python.write_text(
            f'#!/bin/sh\necho "$PYTHONPATH" "$@" > {folder}/called\nexec {sys.executable} {script} "$@"\n'
        )
        python.chmod(0o755)
        (folder / isolated.READY_NAME).touch()
        return folder

    return make


@pytest.fixture
def evaluate(peers: ModuleType) -> Callable[..., int]:
    return functools.partial(run, peers)


def run(peers: ModuleType, output: Path, *options: str, methods: str = f"dense,{PRESS}") -> int:
    arguments = ["--model", "tiny-lm", "--tasks", "key-value", "--methods", methods, "--output", str(output)]
    return peers.main([*arguments, "--documents", "1", "--length", "500", *options])


def records(folder: Path) -> dict[str, dict]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return {record["method"]: record for record in map(json.loads, lines)}


@pytest.mark.parametrize("name", suites()["offline"])
def test_a_document_is_the_same_for_a_process(name: str, script: Callable[[str], ModuleType], tokenizer: Any) -> None:
    source = Source(tokenizer, 1, 900)
    document = documents_of(get_task(name), source)[0]
    received = script("worker").read_document(json.loads(json.dumps(dataclasses.asdict(document))))
    assert received == document and received.digest == document.digest


@pytest.mark.parametrize("made", [False, True])
def test_an_environment_that_is_missing(
    evaluate: Callable[..., int], isolated: ModuleType, made: bool, environment: Any, tmp_path: Path, capsys: Any
) -> None:
    """If it is missing or incomplete, the others run, and its row says what to do."""
    if made:
        (environment("") / isolated.READY_NAME).unlink()
    assert evaluate(tmp_path / "run") == 0
    table = (tmp_path / "run" / "table.md").read_text()
    assert f"| {PRESS} | - | - | failed | failed | failed |" in table
    assert f"- `{PRESS}` failed: it needs an environment of its own: make kvpress\n" in table
    assert "| dense | 100.0% |" in table
    # so that it is tried again without --retry
    assert list(records(tmp_path / "run")) == ["dense"]


@pytest.mark.slow
def test_records_of_both_join(
    evaluate: Callable[..., int], isolated: ModuleType, environment: Any, tmp_path: Path, capsys: Any
) -> None:
    folder = environment(WORKER)
    assert evaluate(tmp_path / "run") == 0
    assert (folder / "called").read_text().split() == [str(CHECKOUT), str(isolated.WORKER)]
    here, there = (records(tmp_path / "run" / part) for part in ("", "environments/kvpress"))
    assert list(here) == ["dense"] and list(there) == [PRESS]
    assert there[PRESS]["metrics"] == here["dense"]["metrics"]
    assert there[PRESS]["dense_bytes"] == there[PRESS]["bytes"] == here["dense"]["bytes"]
    settings = [json.loads((tmp_path / "run" / part / "run.json").read_text()) for part in ("", "environments/kvpress")]
    assert settings[0] == settings[1] == {"model": "tiny-lm", "dtype": "bfloat16", "seed": 0}
    assert f"| {PRESS} | 100.0% | 100.0% | - | 0.0000 | 1.000 |" in capsys.readouterr().out
    # nothing is run twice
    before = (tmp_path / "run" / "environments" / "kvpress" / "records.jsonl").read_bytes()
    assert evaluate(tmp_path / "run") == 0
    assert (tmp_path / "run" / "environments" / "kvpress" / "records.jsonl").read_bytes() == before
    # and the results remain available without the environment
    (folder / isolated.READY_NAME).unlink()
    assert evaluate(tmp_path / "run", methods="dense") == 0
    assert f"| {PRESS} | 100.0% |" in (tmp_path / "run" / "table.md").read_text()


@pytest.mark.slow
def test_alone(evaluate: Callable[..., int], environment: Any, tmp_path: Path) -> None:
    environment(WORKER)
    assert evaluate(tmp_path / "run", "--quiet", methods=PRESS) == 0
    assert not (tmp_path / "run" / "records.jsonl").exists()
    assert f"| {PRESS} | 100.0% |" in (tmp_path / "run" / "table.md").read_text()


@pytest.mark.slow
def test_a_refusal_of_the_other_process(evaluate: Callable[..., int], environment: Any, tmp_path: Path) -> None:
    """Its folder holds a run of another model."""
    environment(WORKER)
    folder = tmp_path / "run" / "environments" / "kvpress"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"model": "other", "dtype": "bfloat16", "seed": 0}))
    assert evaluate(tmp_path / "run") == 0
    table = (tmp_path / "run" / "table.md").read_text()
    assert f"- `{PRESS}` failed: environment kvpress: {folder} holds a run with model='other', not 'tiny-lm'" in table


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("sys.exit(3)", "its process ended with exit code 3"),
        ("sys.stdin.read(); os.kill(os.getpid(), 9)", "its process ended with exit code -9"),
        ("sys.stdin.read(); raise MemoryError", "its process ended with exit code 1"),
    ],
)
def test_a_process_that_dies(
    evaluate: Callable[..., int], environment: Any, tmp_path: Path, program: str, said: str
) -> None:
    environment(program)
    assert evaluate(tmp_path / "run") == 0
    assert f"- `{PRESS}` failed: environment kvpress: {said}" in (tmp_path / "run" / "table.md").read_text()


def test_what_it_says_is_passed_on(evaluate: Callable[..., int], environment: Any, tmp_path: Path, capsys: Any) -> None:
    environment("sys.stdin.read(); print('kvpress:x failed on a: b')")
    assert evaluate(tmp_path / "run") == 0
    assert "kvpress:x failed on a: b\n" in capsys.readouterr().out


def test_an_interrupt_ends_it(
    evaluate: Callable[..., int],
    isolated: ModuleType,
    environment: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment("sys.stdin.read(); print('begun', flush=True); time.sleep(600)")
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt(*arguments: Any, **options: Any) -> None:
        if arguments == ("begun\n",):
            raise KeyboardInterrupt

    monkeypatch.setattr(isolated.subprocess, "Popen", Popen)
    monkeypatch.setattr(isolated, "print", interrupt, raising=False)
    assert evaluate(tmp_path / "run") == 130
    assert [process.poll() for process in started if str(isolated.WORKER) in process.args] == [-15]
    assert list(records(tmp_path / "run")) == ["dense"]
    assert "| dense | 100.0% |" in (tmp_path / "run" / "table.md").read_text()


def test_a_process_that_does_not_end_is_killed(isolated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "ENDING_SECONDS", 0.2)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.readline()
    isolated._end(process)
    assert process.returncode == -9
    process.stdout.close()
