"""Soaks a server in mixed traffic for a long time on a CPU: `hf-diffkv serve` with tiny-lm and all kinds of clients.

Clients ask for whole answers and streams, greedy and sampled, disconnect early, and send invalid requests. Halfway
through, the server is stopped with SIGTERM and restarted with its folder of prefixes. Afterwards, nothing may be lost:
every request has one answer and one line in the log, every greedy answer matches `generate()`, every stream has its
last event, every counter is back to zero, and the process does not grow.

    python benchmarks/soak.py [--seconds 1800] [--requests 5000]
    python benchmarks/soak.py --report [--document]   # prints the table; also writes docs/notes/serving.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import report_soak
import torch
from cpu_caches import FOLDERS, ROOT, about_machine, append_rows, load_model
from soak_clients import TRY_LATER, Clients, Outcome
from soak_prompts import TEMPLATE, Reference, make_prompts
from transformers import AutoTokenizer

RESULTS = Path(__file__).parent / "results" / "soak.jsonl"
# what is requested while all goes well, and how much waits beyond that
LONGEST, SLOTS, QUEUE, AT_ONCE = 1200, 16, 12, 26
GRACE = 3
# seconds until a client that was told to retry does so
RETRY = 1
# seconds between memory readings
EVERY = 5
# allowed growth, as a share of the process's memory after a third of its time
GROWTH = 0.1
PATIENCE = 300
# seconds between checks for room for a client, or for the end of all clients
LOOK = 0.02


class Process:
    """A server in a separate process.

    Args:
        folder: folder for prefixes, template and log.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.log = folder / "log.jsonl"
        (folder / "template.jinja").write_text(TEMPLATE)
        prefixes = {"prefix-bytes": "64MB", "prefix-folder": folder / "prefixes", "prefix-folder-bytes": "256MB"}
        limits = {"max-length": LONGEST, "max-requests": SLOTS, "max-queue": QUEUE, "timeout": PATIENCE, "grace": GRACE}
        others = {
            "host": "127.0.0.1",
            "port": port,
            "chat-template": folder / "template.jinja",
            "dtype": "float32",
            "device": "cpu",
        }
        given = {"max-bytes": "60MB", "log-format": "json", **prefixes, **limits, **others}.items()
        options = ["--lossless", "--greedy", *(f"--{name}={value}" for name, value in given)]
        command = [sys.executable, "-m", "hf_diffkv", "serve", str(FOLDERS["tiny-lm"]), *options]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log.open("a") as file:
            self._process = subprocess.Popen(command, stderr=file, env=variables)
        self._memory = psutil.Process(self._process.pid)
        # in MB, at fixed intervals
        self.megabytes: list[float] = []

    async def ready(self, address: str) -> None:
        """Returns once it accepts requests."""
        async with httpx.AsyncClient(base_url=address) as client:
            for _ in range(PATIENCE * 5):
                if self._process.poll() is not None:
                    raise SystemExit(f"the server did not start: {self.log.read_text()}")
                try:
                    if (await client.get("/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)
        raise SystemExit("the server did not answer.")

    async def watch(self) -> None:
        """Records its memory for as long as it runs."""
        while self._process.poll() is None:
            try:
                self.megabytes.append(self._memory.memory_info().rss / 1e6)
            except psutil.NoSuchProcess:
                return
            await asyncio.sleep(EVERY)

    async def stop(self) -> int:
        """Exit code after a signal."""
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self._process.wait, PATIENCE)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Soak:
    """One run.

    Args:
        folder: folder for all files of the server.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, reference: Reference) -> None:
        rng = random.Random(args.seed)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{self._port}"
        self._folder, self._args = folder, args
        prompts = make_prompts(reference, args.prompts, args.longest, rng)
        self._clients = Clients(self._address, prompts, reference, LONGEST, args.new_tokens, args.seed)
        self._up = asyncio.Event()
        self._outcomes: list[Outcome] = []
        self._no_server = 0
        self._processes: list[Process] = []
        self._at_rest: list[dict[str, Any]] = []
        self._codes: list[int] = []

    async def run(self) -> dict[str, Any]:
        """Results, and whatever was wrong."""
        watching = [await self._start()]
        began, tasks, room = time.perf_counter(), [], asyncio.Semaphore(AT_ONCE)
        restart = None
        for number in range(self._args.requests):
            due = began + number * self._args.seconds / self._args.requests
            await asyncio.sleep(max(0, due - time.perf_counter()))
            while room.locked():
                await asyncio.sleep(LOOK)
                _check(restart)
            await room.acquire()
            passed = (time.perf_counter() - began) / self._args.limit
            if passed > 1:
                room.release()
                break
            tasks.append(asyncio.ensure_future(self._one(room)))
            if restart is None and (passed > 0.5 or 2 * number >= self._args.requests):
                restart = asyncio.ensure_future(self._restart(watching))
        while any(not task.done() for task in tasks):
            await asyncio.sleep(LOOK)
            _check(restart)
        await asyncio.gather(*tasks)
        if restart is not None:
            await restart
        seconds = time.perf_counter() - began
        await self._rest()
        self._codes.append(await self._processes[-1].stop())
        await asyncio.gather(*watching)
        await self._clients.close()
        return self._figures(seconds)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    async def _start(self) -> asyncio.Task:
        process = Process(self._folder, self._port)
        self._processes.append(process)
        await process.ready(self._address)
        self._up.set()
        return asyncio.ensure_future(process.watch())

    async def _restart(self, watching: list[asyncio.Task]) -> None:
        self._up.clear()
        self._clients.restarting = True
        self._at_rest.append(await self._state())
        self._codes.append(await self._processes[-1].stop())
        watching.append(await self._start())
        self._clients.restarting = False

    async def _one(self, room: asyncio.Semaphore) -> None:
        kind = self._clients.kind()
        try:
            while True:
                outcome = await self._clients.send(kind)
                if outcome.reached:
                    self._outcomes.append(outcome)
                    if outcome.status not in TRY_LATER:
                        return
                    await asyncio.sleep(RETRY)
                else:
                    self._no_server += 1
                await self._up.wait()
        finally:
            room.release()

    async def _state(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self._address, timeout=PATIENCE) as client:
            return (await client.get("/diffkv")).json()

    async def _rest(self) -> None:
        """Waits until the server is idle."""
        for _ in range(100):
            found = await self._state()
            if (found["requests"], found["waiting"]) == (0, 0):
                break
            await asyncio.sleep(0.1)
        self._at_rest.append(found)

    def _figures(self, seconds: float) -> dict[str, Any]:
        outcomes, last = self._outcomes, self._at_rest[-1]
        wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
        wrong += _log_faults(self._processes[-1].log, outcomes)
        wrong += [f"exit code {code}" for code in self._codes if code]
        rest = {name: last[name] for name in ("requests", "waiting", "free_share")}
        if rest != {"requests": 0, "waiting": 0, "free_share": 1.0}:
            wrong.append(f"at rest there is {rest}")
        memory = []
        for process in self._processes:
            held = process.megabytes
            early, late = statistics.median(held[len(held) // 3 :][:5]), statistics.median(held[-5:])
            memory.append({"after a third": early, "at the end": late, "most": max(held)})
            if late > early * (1 + GROWTH):
                wrong.append(f"the process grew from {early:.0f} to {late:.0f} MB")
        answered = [outcome for outcome in outcomes if outcome.status == 200]
        prefixes = [state["prefixes"] for state in self._at_rest]
        hits = sum((Counter(found["hits"]) for found in prefixes), Counter())
        return {
            "seconds": seconds,
            "sent": len(outcomes),
            "kinds": dict(Counter(outcome.kind for outcome in outcomes)),
            "statuses": dict(Counter(str(outcome.status or "left") for outcome in outcomes)),
            "compared": sum(outcome.compared for outcome in outcomes),
            "cut": sum(outcome.cut for outcome in outcomes),
            "no_server": self._no_server,
            "first_token": _quantiles([outcome.first for outcome in answered if outcome.first is not None]),
            "whole": _quantiles([outcome.whole for outcome in answered]),
            "prompt_tokens": sum(state["prompt_tokens"] for state in self._at_rest),
            "reused_tokens": sum(found["tokens_reused"] for found in prefixes),
            "generated_tokens": sum(state["generated_tokens"] for state in self._at_rest),
            "hits": dict(hits),
            "peak_bytes": max(state["peak_bytes"] for state in self._at_rest),
            "max_bytes": last["max_bytes"],
            "memory": memory,
            "wrong": len(wrong),
            "first_wrong": wrong[:20],
        }


def _check(restart: asyncio.Task | None) -> None:
    """Raises any error of a restart, since clients would wait for a server for ever."""
    if restart is not None and restart.done():
        restart.result()


def _log_faults(log: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Lists requests without a line or with several, and lines that report a failure."""
    found, faults = Counter(), []
    for text in log.read_text().splitlines():
        line = json.loads(text) if text.startswith("{") else {"event": "text", "message": text}
        if line["event"] == "request":
            found[line["id"]] += 1
            if line["status"] == 500:
                faults.append(text)
        elif line["event"] == "text" or line.get("level") in ("error", "critical"):
            faults.append(text)
    faults += [f"{outcome.kind} has {found[outcome.id]} lines" for outcome in outcomes if found[outcome.id] != 1]
    return faults


def _quantiles(values: list[float]) -> list[float]:
    """Median, 95th and 99th percentile, and maximum."""
    values = sorted(values)
    return [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.95, 0.99, 1)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800, help="in which the requests are sent, evenly")
    parser.add_argument("--limit", type=float, default=2100, help="seconds after which none is sent any more")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--prompts", type=int, default=60, help="different ones")
    parser.add_argument("--longest", type=int, default=600, help="characters of a prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="most of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the server's files; a temporary one by default")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what the output holds")
    parser.add_argument("--document", action="store_true", help="with --report: into docs/notes/serving.md as well")
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole test."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS["tiny-lm"])
    tokenizer.chat_template = TEMPLATE
    reference = Reference(load_model("tiny-lm", torch.float32, 0), tokenizer, args.new_tokens)

    async def run() -> dict[str, Any]:
        soak = Soak(folder, args, reference)
        try:
            return await soak.run()
        finally:
            soak.kill()

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run())


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if not args.report:
        about = {**about_machine(), "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count()}
        row = measure(args)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        append_rows(args.output, about, [{"requests": args.requests, **row}])
        for text in row["first_wrong"]:
            print(f"wrong: {text}", file=sys.stderr)
    report_soak.report(args.output)
    if args.report and args.document:
        report_soak.document(args.output)
    if not args.report and row["wrong"]:
        raise SystemExit(f"{row['wrong']} things were wrong.")


if __name__ == "__main__":
    main()
