"""Runs a program that a model has written.

A process of its own with limits on time, memory and files keeps mistakes away from the evaluation. It is no protection
against a program that means harm: use a container for models you do not trust.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

SECONDS = 20.0
MEMORY = 4 << 30
FILE_BYTES = 16 << 20
# the exit code of a program that came to its end
PASSED = 77
# runs the program that standard input holds; Windows has no limits
LAUNCHER = f"""
import os, sys
program = sys.stdin.buffer.read()
try:
    import resource
except ImportError:
    pass
else:
    limits = {{resource.RLIMIT_AS: {MEMORY}, resource.RLIMIT_FSIZE: {FILE_BYTES}, resource.RLIMIT_CORE: 0}}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
exec(compile(program, "program.py", "exec"), {{"__name__": "program"}})
os._exit({PASSED})
"""


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a Python program runs to its end, without an exception, in time.

    It runs in an empty folder, without output and without the environment of this process, and cannot end early with
    success.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", LAUNCHER],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        return process.returncode == PASSED


def _end(process: subprocess.Popen) -> None:
    """Ends the process and those it has started."""
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()
    process.wait()
