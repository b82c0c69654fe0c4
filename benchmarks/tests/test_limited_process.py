"""Programs in a limited process: one that succeeds, several that fail, and some that reach outside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SUM = "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5\n"


@pytest.fixture
def limited(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("field_tasks.limited")


def test_one_that_is_right(limited: ModuleType) -> None:
    assert limited.run(SUM) == limited.Outcome(True)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'not so'", "AssertionError: not so"),
        ("def f(:", "SyntaxError"),
        # a program that exits early did not run to its end
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "exit code 0"),
        ("print('0' * 32, flush=True)\nraise ValueError(1)", "ValueError: 1"),
        ("input()", "EOFError"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("def f(n):\n    return f(n + 1)\nf(0)", "RecursionError"),
    ],
)
def test_ones_that_go_wrong(limited: ModuleType, program: str, reason: str) -> None:
    outcome = limited.run(program)
    assert not outcome.passed and reason in outcome.reason


@pytest.mark.parametrize(
    "program",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(100)",
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
    ],
)
def test_ones_that_do_not_end(limited: ModuleType, program: str) -> None:
    assert limited.run(program, seconds=0.5) == limited.Outcome(False, "timed out")


def test_one_that_ignores_its_alarm(limited: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "GRACE_SECONDS", 0.5)
    program = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(100)"
    assert limited.run(program, seconds=0.5) == limited.Outcome(False, "timed out")


@pytest.mark.parametrize(
    "program",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import socket\nsocket.getaddrinfo('localhost', 80)",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
        "import os\nos.system('true')",
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 0)",
        "import subprocess\nsubprocess.run(['true'])",
        "import shutil\nshutil.rmtree('x')",
        "import os\nos.mkdir('../hf-diffkv-limited')",
    ],
)
def test_ones_that_reach_outside(limited: ModuleType, program: str) -> None:
    outcome = limited.run(program)
    assert not outcome.passed
    # the caller that asked for the address hides the error's name
    assert "is refused" in outcome.reason


def test_files(limited: ModuleType, tmp_path: Path) -> None:
    """A program may write only in its own folder, which is gone afterwards."""
    assert limited.run("open('mine', 'w').write('x')\nassert open('mine').read() == 'x'").passed
    assert not Path("mine").exists()
    kept = tmp_path / "kept"
    kept.write_text("before")
    for way in (f"open({str(kept)!r}, 'w')", f"import os\nos.remove({str(kept)!r})"):
        assert "is refused" in limited.run(way).reason
    assert kept.read_text() == "before"


def test_the_environment_stays_outside(limited: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_TESTS", "1")
    program = "import os\nassert 'A_SECRET_OF_THE_TESTS' not in os.environ and os.environ['HOME'] == os.getcwd()"
    assert limited.run(program) == limited.Outcome(True)
    assert "A_SECRET_OF_THE_TESTS" in os.environ


def test_without_a_network(limited: ModuleType) -> None:
    """The namespace has no interface that is up, if the kernel allows one."""
    program = "import os\nassert os.readlink('/proc/self/ns/net') != {here!r}"
    here = Path("/proc/self/ns/net")
    if not here.exists():
        pytest.skip("needs Linux")
    outcome = limited.run(program.format(here=os.readlink(here)))
    if not outcome.passed:
        assert os.system("unshare -rn true 2>/dev/null") != 0
