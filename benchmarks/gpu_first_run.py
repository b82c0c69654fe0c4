"""The first measurements to make on a GPU, within 25 minutes: `python benchmarks/gpu_first_run.py`.

The order is: correctness of the kernels, attention, tokens per second within a budget of bytes, time to the first
token, compaction, latents, kernel settings, and steps over the length; then the tables and which targets are met. Each
part has its own time limit. If a part fails, is missing or runs out of time, the results say so, and the next part
runs. `--parts` runs some of them, for example to continue an earlier run; `--minutes` scales all limits. Nothing needs
to be installed: this checkout runs with the Python packages that are already there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
# share of a part's time after which a benchmark starts nothing more
SHARE_TO_START = 0.75
LAST_LINES = 15
# scripts that print the results
TABLES, REPORT, LAST_SECONDS = "tables", "gpu_report", 120
# the presets, the paper's two levels, and their baselines
CACHES = ("DynamicCache", "DiffKV balanced", "DiffKV small", "DiffKV quality", "DiffKV paper")
STEPS = ("StaticCache, compiled", "DynamicCache", "DiffKV balanced", "DiffKV paper")


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        limit: seconds after which the part is stopped.
        script: name of a script in this folder; None runs the tests.
        arguments: arguments of the script, or names of test files, which run together if they are in one string.
    """

    limit: int
    script: str | None
    arguments: tuple[str, ...] = ()


PARTS: dict[str, Part] = {
    "tests": Part(400, None, ("kernels prompts models latents graphs captures families generate batching", "memory")),
    "attention": Part(210, "attention_gpu", ("--quick", "--models", "llama-3-8b")),
    "budget": Part(280, "decode_gpu", ("--parts", "budget", "--caches", *CACHES)),
    "first-token": Part(180, "ttft_gpu"),
    "compaction": Part(90, "memory_manager_gpu", ("--quick",)),
    "latents": Part(60, "latent_gpu", ("--cases", "1x4096", "32x4096")),
    "sweep": Part(90, "attention_gpu", ("--sweep",)),
    "length": Part(190, "decode_gpu", ("--parts", "length", "--contexts", "1024", "4096", "2048", "--caches", *STEPS)),
}


@dataclass(frozen=True)
class Run:
    """Outcome of a command.

    Attributes:
        status: exit status; None if it ran out of time.
        seconds: duration.
        last: last lines of its output.
    """

    status: int | None
    seconds: float
    last: list[str]

    def row(self) -> dict:
        row = {"seconds": round(self.seconds, 1)}
        if self.status is None:
            row["failed"] = "out of time"
        elif self.status != 0:
            row |= {"failed": f"exit status {self.status}", "last_lines": self.last}
        return row


def run(command: Sequence[str], limit: float) -> Run:
    """Runs a command and shows its output; after `limit` seconds, ends it and all processes that it started."""
    # the tables draw with the evaluation package
    folders = (ROOT, FOLDER, ROOT / "packages" / "evaluation", os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    started, expired = time.monotonic(), threading.Event()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **pipes)

    def end() -> None:
        expired.set()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    timer = threading.Timer(limit, end)
    timer.start()
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in process.stdout:
        print(line, end="", flush=True)
        last.append(line.rstrip())
    status = process.wait()
    timer.cancel()
    return Run(None if expired.is_set() else status, time.monotonic() - started, list(last))


def commands(name: str, args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the commands of a part, by name of the script or test file."""
    if name in (TABLES, REPORT):
        return {name: [sys.executable, str(FOLDER / f"{name}.py"), "--results", str(args.results)]}
    part = PARTS[name]
    if part.script is None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_lines", "--lines", str(tests_path(args))]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(16, os.cpu_count() or 1))]
        paths = {names: [f"tests/gpu/test_{name}_on_gpu.py" for name in names.split()] for names in part.arguments}
        return {names: [*command, *files] for names, files in paths.items()}
    command = [sys.executable, str(FOLDER / f"{part.script}.py"), *part.arguments]
    command += ["--output", str(args.results / f"{part.script}.jsonl")]
    command += ["--seconds", str(int(SHARE_TO_START * limit_of(name, args)))]
    command += ["--commit", args.commit] if args.commit else []
    command += ["--tiny", "--device", "cpu", "--repeats", "2"] if args.tiny else []
    return {part.script: command}


def limit_of(name: str, args: argparse.Namespace) -> float:
    """Returns the time limit of a part in seconds, given `--minutes` for all wanted parts."""
    if name not in PARTS:
        return LAST_SECONDS
    if args.minutes is None:
        return PARTS[name].limit
    return 60 * args.minutes * PARTS[name].limit / sum(PARTS[part].limit for part in args.parts)


def tests_path(args: argparse.Namespace) -> Path:
    """Returns the path of the file to which each test appends its line."""
    return args.results / "tests_gpu.jsonl"


def note(path: Path, row: dict) -> None:
    """Appends a line to the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run_part(name: str, args: argparse.Namespace) -> list[dict]:
    """Runs all commands of a part within its time limit, records each as a line of the results, and returns these."""
    end = time.monotonic() + limit_of(name, args)
    rows = []
    for what, command in commands(name, args).items():
        left = end - time.monotonic()
        print(f"\n=== {name}: {what}, at most {max(left, 0.0):.0f} s\n", flush=True)
        row = {"kind": "part", "part": name, "what": what}
        before = len(outcomes(args))
        try:
            row |= run(command, left).row() if left > 0 else {"failed": "no time left to start it"}
        except OSError as error:
            row["failed"] = str(error)
        counts = Counter(outcomes(args)[before:])
        row |= {"tests": counts} if counts else {}
        note(args.results / "first_run_gpu.jsonl", row)
        rows.append(row)
    return rows


def outcomes(args: argparse.Namespace) -> list[str]:
    """Returns the outcome of each test so far: passed, failed or skipped."""
    path = tests_path(args)
    return [json.loads(line)["outcome"] for line in path.read_text().splitlines()] if path.is_file() else []


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a part failed, 0 otherwise."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="in this order")
    options.add_argument("--minutes", type=float, help="for these parts together, instead of their own limits")
    options.add_argument("--results", type=Path, default=FOLDER / "results", help="folder of the JSON lines")
    options.add_argument("--commit", help="of this code, where it is run outside its repository")
    options.add_argument("--tiny", action="store_true", help="sizes for a CPU: whether it runs, not how fast")
    args = options.parse_args(arguments)
    args.results = args.results.resolve()
    rows = [row for name in args.parts for row in run_part(name, args)]
    print("\n=== parts\n")
    for row in rows:
        counts = "".join(f", {count} {outcome}" for outcome, count in row.get("tests", {}).items())
        print(f"- {row['part']}, {row['what']}: {row.get('seconds', 0)} s, {row.get('failed', 'done')}{counts}")
    rows += run_part(TABLES, args)
    print("\nFor a pull request, with the JSON lines:\n")
    rows += run_part(REPORT, args)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
