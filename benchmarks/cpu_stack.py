"""Compares whole stacks on a CPU: Transformers with DynamicCache and DiffKV, and llama.cpp with its caches.

Weights are bfloat16 and bitsandbytes' 4 bits in Transformers; llama.cpp uses the GGUF file from which the model was
made. Each competitor is a separate process (`stack_torch.py`, `stack_llama.py`) that reads the same prompt and then the
same tokens. They take turns of a few steps, so that all see the machine in the same state. The first step of a turn is
not timed, and the other processes are idle meanwhile. Cases already in the output for this commit are skipped. Requires
`make llama-cpp` and `make models GGUF=1`.

    python benchmarks/cpu_stack.py [--models qwen2.5-coder-0.5b] [--tokens 256 4096] [--caches balanced q8_0]
    python benchmarks/cpu_stack.py --table [--document]   # prints the results; also writes README.md and docs/
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stack_report
from cpu_caches import about_machine

from hf_diffkv.running.models import MODELS_FOLDER, load_config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "cpu_stack.jsonl"
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
TOKENS = (256, 4096, 8192, 16384)
LLAMA_PYTHON = ROOT / "build" / "envs" / "llama-cpp" / "bin" / "python"
WORKERS = {"Transformers": "stack_torch.py", "llama.cpp": "stack_llama.py"}
TRANSFORMERS, LLAMA = WORKERS
WEIGHTS = ("bfloat16", "4bit", "GGUF")
# seconds between two turns, in which the previous turn's threads stop spinning
PAUSE = 0.1


@dataclass(frozen=True)
class Competitor:
    """A stack to be timed.

    Attributes:
        stack: one of `WORKERS`.
        weights: one of `WEIGHTS`.
        cache: name of the cache, as the worker knows it.
    """

    stack: str
    weights: str
    cache: str

    def job(self, model: str, room: int, threads: int) -> dict[str, Any]:
        """Returns what the process has to know."""
        job = {"model": model, "cache": self.cache, "room": room, "threads": threads}
        if self.stack == LLAMA:
            return {**job, "gguf": str(gguf_of(model))}
        return {**job, "weights": None if self.weights == "bfloat16" else self.weights}


COMPETITORS = (
    *(
        Competitor(TRANSFORMERS, weights, cache)
        for weights in ("bfloat16", "4bit")
        for cache in ("DynamicCache", "balanced", "small")
    ),
    *(Competitor(LLAMA, "GGUF", cache) for cache in ("f16", "q8_0", "q5_0", "q4_0")),
)


class WorkerError(Exception):
    """A process that ended or sent an invalid answer; the message names it."""


class Worker:
    """The process of a competitor, and its measurements.

    Attributes:
        about: its description of itself after loading.
        taken: milliseconds of each timed step.
        waited: most processor seconds that it spent between two turns.
    """

    def __init__(self, competitor: Competitor, command: Sequence[str], job: dict[str, Any]) -> None:
        self.competitor = competitor
        self.taken: list[float] = []
        self.waited = self.prompt_seconds = 0.0
        self.next = -1
        paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
        variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(job["threads"])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self.about = self.ask(job)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            WorkerError: the process ended.
        """
        line = ""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            name = f"{self.competitor.weights}, {self.competitor.cache}"
            raise WorkerError(f"the process of {name} ended with exit code {self.process.wait()}.")
        return json.loads(line)

    def read(self, ids: Sequence[int]) -> None:
        """Sends the prompt."""
        answer = self.ask({"prompt": list(ids)})
        self.prompt_seconds, self.next = answer["seconds"], answer["next"]

    def turn(self, ids: Sequence[int]) -> None:
        """Sends the tokens of a turn, the first of which is not timed."""
        answer = self.ask({"steps": list(ids)})
        self.taken += answer["ms"][1:]
        self.waited = max(self.waited, answer["waited"])

    def row(self) -> dict[str, Any]:
        """Ends the process and returns the result."""
        ended = self.ask({"end": True})
        return {
            **self.about,
            "stack": self.competitor.stack,
            "asked": self.competitor.weights,
            "weights": self.about.get("file_type", self.competitor.weights),
            "cache": self.competitor.cache,
            "step_ms": round(statistics.median(self.taken), 3),
            "step_min_ms": round(min(self.taken), 3),
            "step_deviation_ms": round(statistics.pstdev(self.taken), 3),
            "steps": len(self.taken),
            "prompt_seconds": round(self.prompt_seconds, 3),
            "next": self.next,
            "waited_seconds": round(self.waited, 3),
            **ended,
        }

    def close(self) -> None:
        """Ends the process if it is still running."""
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def gguf_of(model: str) -> Path:
    """The GGUF file from which a model was made.

    Raises:
        SystemExit: the file does not exist.
    """
    path = MODELS_FOLDER / f"{model}.gguf"
    if not path.is_file():
        raise SystemExit(f"llama.cpp needs {path}: make models MODELS={model} GGUF=1, or leave it out by --weights.")
    return path


def command_of(competitor: Competitor) -> list[str]:
    """Command of a competitor's process.

    Raises:
        SystemExit: its environment is missing.
    """
    if competitor.stack == LLAMA and not LLAMA_PYTHON.exists():
        raise SystemExit("llama.cpp needs an environment of its own: make llama-cpp, or leave it out by --weights.")
    python = str(LLAMA_PYTHON) if competitor.stack == LLAMA else sys.executable
    return [python, str(Path(__file__).with_name(WORKERS[competitor.stack]))]


def ids_of(model: str, count: int) -> list[int]:
    """The first `count` token ids of this project's documents, which are the same in both runtimes' copies of a model.

    Raises:
        SystemExit: the documents have fewer tokens.
    """
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = load_config(model)[1](text, truncation=True, max_length=count).input_ids
    if len(ids) < count:
        raise SystemExit(f"the documents have {len(ids):,} tokens and {count:,} are needed; give fewer --tokens.")
    return ids


def measure(
    competitors: Sequence[Competitor], model: str, ids: Sequence[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measures the competitors in turns and returns the result fields of each.

    Args:
        ids: tokens of the prompt and of all steps after it.

    Raises:
        WorkerError: a process ended.
    """
    each = args.steps + 1
    prompt = len(ids) - args.turns * each
    with ExitStack() as stack:
        workers = []
        for competitor in competitors:
            print(f"  {competitor.weights}, {competitor.cache}: loading", file=sys.stderr, end="", flush=True)
            worker = Worker(competitor, command_of(competitor), competitor.job(model, len(ids), args.threads))
            workers.append(worker)
            stack.callback(worker.close)
            worker.read(ids[:prompt])
            print(f", {prompt:,} tokens in {worker.prompt_seconds:.1f} s", file=sys.stderr, flush=True)
        for turn in range(args.turns):
            first = prompt + turn * each
            # a different one starts each turn
            begin = turn % len(workers)
            for worker in workers[begin:] + workers[:begin]:
                time.sleep(PAUSE)
                worker.turn(ids[first : first + each])
        rows = [worker.row() for worker in workers]
    case = {"kind": "stack", "model": model, "tokens": prompt, "threads": args.threads}
    return [{**case, **row} for row in rows]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="short names, with a GGUF file beside each")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of the prompt")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, help="default: all")
    parser.add_argument("--caches", nargs="+", choices=sorted({c.cache for c in COMPETITORS}), help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="timed in each turn")
    parser.add_argument("--again", action="store_true", help="measure also what the output has for this commit")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what the output holds")
    parser.add_argument("--document", action="store_true", help="with --table: into README.md and docs/ as well")
    args = parser.parse_args(arguments)
    if min(args.threads, args.turns, args.steps) < 1 or min(args.tokens) < 1:
        parser.error("--threads, --turns, --steps and --tokens must be at least 1")
    return args


def chosen(args: argparse.Namespace) -> list[Competitor]:
    """Competitors selected on the command line."""
    return [
        competitor
        for competitor in COMPETITORS
        if (not args.weights or competitor.weights in args.weights)
        and (not args.caches or competitor.cache in args.caches)
    ]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.table:
        print(stack_report.table(stack_report.read(args.output)))
        if args.document:
            stack_report.document(args.output)
        return
    about = about_machine()
    about = {key: about[key] for key in ("device", "commit")}
    competitors, failures = chosen(args), []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        for tokens in args.tokens:
            wanted = {(model, tokens, args.threads, c.stack, c.cache, c.weights) for c in competitors}
            if not args.again and wanted <= stack_report.measured(args.output, about["commit"]):
                print(f"{model}, {tokens:,} tokens: measured already", flush=True)
                continue
            print(f"{model}, {tokens:,} tokens", flush=True)
            ids = ids_of(model, tokens + args.turns * (args.steps + 1))
            try:
                rows = measure(competitors, model, ids, args)
            except WorkerError as error:
                failures.append(f"{model}, {tokens:,} tokens: {error}")
                print(failures[-1], flush=True)
                continue
            with args.output.open("a") as file:
                file.writelines(json.dumps({**row, **about}) + "\n" for row in rows)
    print(stack_report.table(stack_report.read(args.output)))
    if failures:
        raise SystemExit("not measured:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
