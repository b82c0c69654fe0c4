"""A process that times one cache of one runtime on request: JSON lines on its standard input and output.

Both runtimes' workers import this file. It needs only the standard library, because llama.cpp's environment has neither
PyTorch nor this library.

    {"prompt": [ids]}   reads the prompt; answers {"seconds": ..., "next": the most likely token}
    {"steps": [ids]}    takes these tokens one by one; answers {"ms": [...], "waited": ...}
    {"end": true}       answers {"peak_bytes": ..., "loading_peak_bytes": ..., "cache_bytes": ...} and ends

`waited` is the processor time in seconds that the process spent between its last answer and the request; `peak_bytes`
is the peak after loading, if the system reports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


class Runtime(Protocol):
    """A loaded model with an empty cache."""

    def read(self, ids: Sequence[int]) -> int:
        """Reads a prompt, or one more token, and returns the most likely next token."""

    def held(self) -> int | None:
        """Bytes of the cache, or None if the runtime does not report them."""

    def about(self) -> dict[str, Any]:
        """Versions and other information about the runtime for the record."""


def serve(load: Callable[[dict[str, Any]], Runtime]) -> None:
    """Loads what the first line of the input describes, reports `about`, and answers requests until told to end.

    Output of libraries goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runtime = load(json.loads(sys.stdin.readline()))
    loading = peak_bytes()
    forget_peak()
    say(answers, runtime.about())
    worked = time.process_time()
    for line in sys.stdin:
        request = json.loads(line)
        waited = time.process_time() - worked
        if "end" in request:
            peaks = {"peak_bytes": peak_bytes(), "loading_peak_bytes": loading}
            say(answers, {**peaks, "cache_bytes": runtime.held()})
            return
        if "prompt" in request:
            began = time.perf_counter()
            following = runtime.read(request["prompt"])
            say(answers, {"seconds": time.perf_counter() - began, "next": following})
        else:
            taken = []
            for token in request["steps"]:
                began = time.perf_counter()
                runtime.read([token])
                taken.append(1e3 * (time.perf_counter() - began))
            say(answers, {"ms": taken, "waited": waited})
        worked = time.process_time()


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    """Writes one line immediately."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def forget_peak() -> None:
    """Resets the system's peak memory reading, if possible."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def peak_bytes() -> int | None:
    """Peak resident memory of this process since `forget_peak`, including mapped files; None if unknown."""
    if not STATUS.is_file():
        return None
    return 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)[1])
