"""Sets up the virtual environment for `make`, and reports what it does, how long it takes and how much it downloads.

    python3 tools/set_up.py .venv demo     # what `make demo` needs
    python3 tools/set_up.py .venv all      # the rest, for the tests and everything else

It needs only the standard library. The native code is compiled while PyTorch is downloaded and unpacked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# what is installed, and why; the library itself is then in place, but not its requirements
STAGES = {
    "demo": (("hf-diffkv[plot]", "gguf"), "what the library and the demo need"),
    "page": (("-e", "packages/demo"), "the page in the browser and what it needs"),
    "all": (
        ("hf-diffkv[dev]", *("-e", "packages/demo", "-e", "packages/evaluation[harness]", "-e", "packages/serving")),
        "the server, the page, the evaluation, and what tests, checks and documents need",
    ),
    "ray": (("-e", "packages/serving[ray]"), "what the tests on many machines need"),
}
# oldest Python for a stage; `all` needs a Transformers that no longer supports 3.10
OLDEST = {"demo": (3, 10), "page": (3, 10), "all": (3, 11), "ray": (3, 11)}
VERSION = re.compile(r"^version(?:_info)? = (\d+)\.(\d+)", re.MULTILINE)
# seconds of silence before a step reports that it is running
SILENCE = 10
# smaller packages are counted but not named
NAMED_MB = 10
UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1, "GB": 1e3}
DOWNLOADED = re.compile(r"\s*Downloading (\S+) \(([\d.]+) (bytes|kB|MB|GB)\)")
ON_DISK = re.compile(r"\s*Processing (?:file://)?(/.*\.whl)$")


class SetUpError(Exception):
    """A step that failed; the message contains the output of its program."""


class Report:
    """Lines printed one at a time, each beginning with the time since the start in minutes and seconds."""

    def __init__(self) -> None:
        self.began = self.said = time.monotonic()
        self.megabytes = 0.0
        self._lock = threading.Lock()

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def count(self, megabytes: float) -> None:
        with self._lock:
            self.megabytes += megabytes

    def say(self, text: str) -> None:
        with self._lock:
            self.said = time.monotonic()
            minutes, seconds = divmod(int(self.seconds()), 60)
            print(f"{minutes}:{seconds:02d}  {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sets up what the command line requests and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path, help="folder of the virtual environment")
    parser.add_argument("stage", choices=STAGES, help="how much of it; `demo` comes first")
    parser.add_argument("--torch", default="torch", help="requirement for PyTorch")
    options = parser.parse_args(arguments)
    report = Report()
    try:
        set_up(options.environment, options.stage, options.torch, report)
    except SetUpError as error:
        print(f"{error}\nset-up failed after {report.seconds():.0f} s", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up was interrupted; the next one goes on from here", file=sys.stderr)
        return 130
    report.say(f"set up in {report.seconds():.0f} s; {report.megabytes:.0f} MB of packages")
    return 0


def set_up(environment: Path, stage: str, torch: str, report: Report) -> None:
    """Runs the steps of a stage.

    Raises:
        SetUpError: a step failed.
    """
    python = environment / "bin" / "python"
    requirements, purpose = STAGES[stage]
    check_python(environment, stage)
    if stage == "demo":
        if not os.access(python, os.X_OK):
            run(f"making an environment in {environment}", [sys.executable, "-m", "venv", str(environment)], report)
        compiled = (
            "" if shutil.which("c++") or shutil.which("g++") else "; there is no C++ compiler, so PyTorch decodes"
        )
        library = Beside(
            f"this library, with native code for CPUs{compiled}", pip(python, "--no-deps", "-e", "."), report
        )
        try:
            run(f"installing PyTorch ({torch})", pip(python, torch), report)
        finally:
            library.wait()
    run(f"installing {purpose}", pip(python, *requirements), report)


def check_python(environment: Path, stage: str) -> None:
    """Raises `SetUpError` if a stage needs a newer Python than the environment has or would be created with."""
    settings = environment / "pyvenv.cfg"
    made = VERSION.search(settings.read_text()) if settings.is_file() else None
    version = tuple(map(int, made.groups())) if made else sys.version_info[:2]
    if version < OLDEST[stage]:
        found, needed = (".".join(map(str, each)) for each in (version, OLDEST[stage]))
        first = f"remove {environment}, which has Python {found}, and" if made else f"this is Python {found};"
        raise SetUpError(f"{first} give Python {needed} or newer, as in `make demo PYTHON=python{needed}`.")


def pip(python: Path, *requirements: str) -> list[str]:
    options = ["--disable-pip-version-check", "--progress-bar=off"]
    return [str(python), "-m", "pip", "install", *options, *requirements]


def run(title: str, command: Sequence[str], report: Report) -> None:
    """Runs a command to its end and reports progress: large downloads, and that it is still running every few seconds.

    Raises:
        SetUpError: its exit code was not 0.
    """
    report.say(title)
    began = time.monotonic()
    over = threading.Event()
    beat = threading.Thread(target=_go_on, args=(report, title, began, over), daemon=True)
    beat.start()
    try:
        taken = follow(command, report)
    finally:
        over.set()
        beat.join()
    report.say(f"  took {time.monotonic() - began:.0f} s{f', {taken:.0f} MB' if taken >= 1 else ''}")


def follow(command: Sequence[str], report: Report) -> float:
    """Runs a command, reports the relevant lines of pip's output, and returns how many MB it downloaded.

    Raises:
        SetUpError: its exit code was not 0; with its last lines.
    """
    program = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    )
    lines, taken = [], 0.0
    for line in program.stdout:
        lines.append(line)
        name, megabytes = size_of(line)
        taken += megabytes
        if megabytes >= NAMED_MB:
            report.say(f"  {name}: {megabytes:.0f} MB")
        elif line.startswith("Installing collected packages: ") and "," in line:
            report.say(f"  unpacking {line.count(',') + 1} packages")
    if program.wait():
        raise SetUpError(f"{''.join(lines[-30:])}failed: {' '.join(command)}")
    report.count(taken)
    return taken


def size_of(line: str) -> tuple[str, float]:
    """The wheel that a line of pip's output names and its size in MB, or no size for other lines."""
    if found := DOWNLOADED.match(line):
        return found[1].split("/")[-1], float(found[2]) * UNITS[found[3]]
    if (found := ON_DISK.match(line.rstrip())) and (path := Path(found[1])).is_file():
        return path.name, path.stat().st_size / 1e6
    return "", 0.0


def _go_on(report: Report, title: str, began: float, over: threading.Event) -> None:
    while not over.wait(1):
        if time.monotonic() - report.said >= SILENCE:
            report.say(f"  still {title} ({time.monotonic() - began:.0f} s)")


class Beside(threading.Thread):
    """A step that runs in parallel with others."""

    def __init__(self, title: str, command: Sequence[str], report: Report) -> None:
        super().__init__(daemon=True)
        self.title, self.command, self.report = title, command, report
        self.error: SetUpError | None = None
        report.say(f"beside what follows: {title}")
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            follow(self.command, self.report)
            self.report.say(f"  done beside it: {self.title} (took {time.monotonic() - began:.0f} s)")
        except SetUpError as error:
            self.error = error

    def wait(self) -> None:
        """Waits for the step and raises its `SetUpError`, if there was one."""
        while self.is_alive():
            self.join(SILENCE)
            if self.is_alive():
                self.report.say(f"  still on {self.title}")
        if self.error:
            raise self.error


if __name__ == "__main__":
    sys.exit(main())
