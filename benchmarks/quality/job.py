"""Reads the job of a process of `isolated.py` from standard input."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError


def run_job(work: Callable[[dict[str, Any]], None]) -> int:
    """Calls `work` with the job and returns the exit code; 2 if it is refused, with the reason in the last line."""
    # Ctrl-C reaches both processes; the waiting one reports it, and this one exits silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        work(json.load(sys.stdin))
    except EvaluationError as error:
        print(error)
        return 2
    return 0
