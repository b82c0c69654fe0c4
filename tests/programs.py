"""Python programs in separate processes, which find the same modules as this one."""

from __future__ import annotations

import os
import subprocess
import sys


def run_program(program: str) -> None:
    """Runs `program`, which must not fail."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
