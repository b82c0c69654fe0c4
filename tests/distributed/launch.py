"""Starts several processes as a user would, and never hangs: a deadlock becomes a failed test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# far beyond what any run takes; only a deadlock gets there
PATIENCE = 600


def launch(*command: str | Path) -> str:
    """Runs `python command` and returns what it printed; fails with all of it where the run does."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the processes wait for each other:\n{output}") from None
    assert process.returncode == 0, output
    return output


def torchrun(processes: int, script: Path, *arguments: str | Path) -> str:
    """`launch` of `processes` processes of one script, on a free port."""
    return launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), script, *arguments)
