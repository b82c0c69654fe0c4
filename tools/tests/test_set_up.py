"""Setting up: what is run, what is reported, and what happens on failure. A program stands in for pip."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!{python}
import sys
command = sys.argv[sys.argv.index("install") + 1:]
open({calls!r}, "a").write(" ".join(word for word in command if word[0] != "-" or word == "-e") + "\\n")
print("Collecting torch")
print("  Downloading torch-2.13.0-cp311-none-any.whl (191.8 MB)")
print("Downloading https://index/small-1.0-py3-none-any.whl (200 kB)")
print("Installing collected packages: small, torch")
if "{fails}" in command:
    sys.exit("ERROR: No matching distribution found")
"""


def environment(folder: Path, fails: str = "nothing") -> Path:
    """A virtual environment whose Python writes what pip is asked to install to `calls`."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.format(python=sys.executable, calls=str(folder / "calls"), fails=fails))
    python.chmod(0o755)
    return folder / "venv"


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_steps_downloads_and_times_are_said(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = environment(tmp_path)
    assert tool.main([str(venv), "demo", "--torch", "torch==2.13.0"]) == 0
    *both, last = calls(tmp_path)
    assert sorted(both) == ["-e .", "torch==2.13.0"] and last == "hf-diffkv[plot] gguf"
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d+:\d\d  ", line) for line in lines)
    said = "\n".join(lines)
    assert said.count("torch-2.13.0-cp311-none-any.whl: 192 MB") == 3 and "small-1.0" not in said
    assert len(re.findall(r"  took \d+ s, \d+ MB$", said, re.MULTILINE)) == 2
    # three times 191.8 and 0.2
    assert re.search(r"set up in \d+ s; 576 MB of packages$", said)


@pytest.mark.parametrize(
    "stage, installed",
    [
        ("page", "-e packages/demo"),
        ("all", "hf-diffkv[dev] -e packages/demo -e packages/evaluation[harness] -e packages/serving"),
        ("ray", "-e packages/serving[ray]"),
    ],
)
def test_later_stages_install_the_rest_alone(tool: ModuleType, tmp_path: Path, stage: str, installed: str) -> None:
    assert tool.main([str(environment(tmp_path)), stage]) == 0
    assert calls(tmp_path) == [installed]


@pytest.mark.parametrize("line", ["version = 3.10.13", "version_info = 3.10.13.final.0"])
@pytest.mark.parametrize("stage, works", [("demo", True), ("page", True), ("all", False), ("ray", False)])
def test_an_environment_of_an_older_python(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, stage: str, works: bool
) -> None:
    venv = environment(tmp_path)
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\n{line}\n")
    assert tool.main([str(venv), stage]) == (0 if works else 1)
    assert (tmp_path / "calls").exists() == works
    if not works:
        said = capsys.readouterr().err
        assert f"remove {venv}, which has Python 3.10" in said and "PYTHON=python3.11" in said


def test_an_older_python_makes_no_environment(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.sys, "version_info", (3, 9, 18))
    assert tool.main([str(tmp_path / "venv"), "demo"]) == 1
    assert not (tmp_path / "venv").exists()
    assert "this is Python 3.9; give Python 3.10 or newer" in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["torch", ".", "gguf"])
def test_what_pip_says_of_a_failure_is_shown(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    assert tool.main([str(environment(tmp_path, fails)), "demo"]) == 1
    printed = capsys.readouterr()
    assert "ERROR: No matching distribution found" in printed.err and "set-up failed after " in printed.err
    assert "set up in" not in printed.out
    assert ("hf-diffkv[plot] gguf" in calls(tmp_path)) == (fails == "gguf")


def test_a_silent_step_says_that_it_goes_on(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "SILENCE", 0)
    tool.run("sleeping", [sys.executable, "-c", "import time; time.sleep(3)"], tool.Report())
    assert "  still sleeping (" in capsys.readouterr().out


def test_sizes_of_wheels(tool: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.0-py3-none-any.whl"
    wheel.write_bytes(bytes(3_000_000))
    assert tool.size_of(f"Processing {wheel}\n") == tool.size_of(f"Processing file://{wheel}\n") == (wheel.name, 3.0)
    assert tool.size_of("  Downloading https://index/a/b.whl (1.5 GB)\n") == ("b.whl", 1500.0)
    assert tool.size_of("  Downloading b.whl.metadata (12 bytes)\n") == ("b.whl.metadata", 12e-6)
    for line in ("Processing /nowhere/a.whl", "Processing /tmp", "Downloading a.whl", "Collecting a (1.5 GB)", ""):
        assert tool.size_of(line) == ("", 0.0)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    "target, stages",
    [
        ("demo", ["demo"]),
        ("models", ["demo"]),
        ("space", ["demo", "page"]),
        ("test", ["demo", "all"]),
        ("setup-ray", ["demo", "all", "ray"]),
    ],
)
def test_what_a_target_sets_up(target: str, stages: list[str], tmp_path: Path) -> None:
    command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.findall(rf"set_up\.py {re.escape(str(tmp_path))} (\w+)", printed) == stages
