"""`hf-diffkv serve` in a process of its own, for tests that ask it over HTTP and send it signals."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[4]
PATIENCE = 180
# an answer that goes on for as long as it may
ENDLESS = {"max_tokens": 1100, "ignore_eos": True}


class LiveServer:
    """The command on tiny-lm, and requests to it.

    Args:
        folder: folder for its output.
        arguments: further arguments of the command.
        environment: environment variables beside those of this process.
    """

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.errors = folder / "stderr.txt"
        options = ["--port=0", "--dtype=float32", "--device=cpu", "--lossless", "--greedy", "--max-bytes=12MB"]
        command = [sys.executable, "-m", "hf_diffkv", "serve", "tiny-lm", *options, *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
        with self.errors.open("w") as file:
            # a shell may have had its children ignore what Ctrl-C sends
            reset = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            self.process = subprocess.Popen(command, stderr=file, env=variables, preexec_fn=reset)
        found = self.until(lambda: re.search(r"http://localhost:\d+", self.errors.read_text()))
        self.client = httpx.Client(base_url=found[0], timeout=PATIENCE)
        self.until(self.is_ready)

    def until(self, found: Callable[[], Any]) -> Any:
        """Waits for a true result of `found` and returns it."""
        for _ in range(PATIENCE * 20):
            result = found()
            if result:
                return result
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)
        raise AssertionError(f"nothing came; {self.errors.read_text()}")

    def is_ready(self) -> bool:
        try:
            return self.client.get("/health").json() == {"status": "ok"}
        except httpx.ConnectError:
            return False

    def statistics(self, **options: Any) -> dict[str, Any]:
        return self.client.get("/diffkv", **options).json()

    def idle(self) -> dict[str, Any]:
        """The statistics, once nothing is in flight or waiting and every page is free."""

        def at_rest() -> dict[str, Any] | None:
            found = self.statistics()
            return found if (found["requests"], found["waiting"], found["free_share"]) == (0, 0, 1.0) else None

        return self.until(at_rest)

    def complete(self, prompt: str, new: int = 6, **options: Any) -> Any:
        """A completion, not as a stream."""
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": new}, **options)

    def stream(self, prompt: str, new: int = 6, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": new, "stream": True, **fields}
        return self.client.stream("POST", "/v1/completions", json=body)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


def events(lines: Any) -> list[Any]:
    """Parses the events of a stream: objects, and "[DONE]"."""
    found = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(each) if each.startswith("{") else each for each in found]
