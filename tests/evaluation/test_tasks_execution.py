"""Programs that end, fail, run on, and try to pass without being tested."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hf_diffkv.evaluation.execution import passes


def test_a_program_that_ends() -> None:
    assert passes("import math\nassert math.gcd(4, 6) == 2\nprint('é')")


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "def",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "import signal, os; os.kill(os.getpid(), signal.SIGKILL)",
        "bytearray(6 << 30)",
        "open('large', 'wb').write(bytes(20 << 20))",
        "input()",
    ],
)
def test_programs_that_fail(program: str) -> None:
    assert not passes(program)


def test_the_main_block_is_not_run() -> None:
    assert passes("if __name__ == '__main__':\n    raise ValueError")


def test_time_ends_children_too(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w').close()"
    assert not passes(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])", seconds=0.7)
    time.sleep(2.5)
    assert not mark.exists()


def test_a_folder_and_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    Path("near.py").write_text("x = 1\n")
    assert passes("import os\nassert 'HF_TOKEN' not in os.environ and os.listdir() == []")
    assert not passes("import near")
    assert passes("open('left', 'w').close()") and not Path("left").exists()
