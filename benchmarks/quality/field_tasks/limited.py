"""Runs generated Python programs in a limited process (`limited_child.py`).

The process has its own folder and environment; limits on time, memory and files; no network, if the kernel allows such
a namespace; and a hook that refuses sockets, further processes and changes outside its folder. This guards against
accidents; it is not a sandbox for programs that try to escape.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("limited_child.py")
SECONDS = 10.0
MEMORY = 1 << 30
# extra time after its own limit before it is killed
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """Result of a program.

    Attributes:
        passed: whether it ran to its end.
        reason: reason why it did not; empty if it did.
    """

    passed: bool
    reason: str = ""


def run(program: str, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Runs a program to completion.

    Args:
        program: source text.
        seconds: limit of its time.
        memory: limit of its address space in bytes.
    """
    # the program cannot guess the token, so exiting early does not look like completion
    token = secrets.token_hex(16)
    command = [sys.executable, "-I", "-B", str(CHILD), token, str(seconds), str(memory)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            # longer than the limit that it sets itself, in case it does not keep to it
            said, _ = process.communicate(program.encode("utf-8", "surrogatepass"), timeout=seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(False, "timed out")
        finally:
            _end(process)
    first, _, rest = said.decode("utf-8", "replace").partition("\n")
    if first == token:
        return Outcome(True)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGALRM, -signal.SIGKILL):
        return Outcome(False, "timed out")
    return Outcome(False, rest.strip() or f"ended with exit code {process.returncode}")


def _end(process: subprocess.Popen) -> None:
    """Ends the process and its whole session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
