"""Runs the application until somebody stops it, and says from time to time what it does."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

from ..manager import DiffKVBatchingManager
from .app import statistics

# seconds that answers under way have when the server is stopped
GRACE = 5


def run(app: Any, engine: DiffKVBatchingManager, listener: socket.socket, *, log_level: str, log_every: float) -> None:
    """Serves `app` until the process is interrupted; the engine runs meanwhile.

    Args:
        listener: a socket with an address.
        log_level: of the server and of Transformers, as uvicorn names it.
        log_every: seconds between lines on stderr; 0 is none.
    """
    import uvicorn

    logging.set_verbosity(logging.log_levels[log_level])
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=GRACE)
    engine.start()
    try:
        with _lines(engine, log_every):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.stop(hard_stop=True)
        if engine.prefixes is not None and engine.prefixes.has_folder:
            engine.prefixes.save()


@contextmanager
def _lines(engine: DiffKVBatchingManager, every: float) -> Iterator[None]:
    """Within, a line on stderr every so many seconds in which something was done."""
    over = threading.Event()

    def write() -> None:
        last, since = statistics(engine), time.monotonic()
        while not over.wait(every):
            found, at = statistics(engine), time.monotonic()
            if found and found != last:
                rate = (found["generated_tokens"] - last.get("generated_tokens", 0)) / (at - since)
                print(line(found, rate), file=sys.stderr, flush=True)
            last, since = found, at

    if every:
        threading.Thread(target=write, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def line(found: dict[str, Any], rate: float) -> str:
    """What `statistics` found, for people.

    Args:
        rate: tokens per second.
    """
    reused = f", {found['prefixes']['tokens_reused']:,} of prompts reused" if "prefixes" in found else ""
    held, peak, budget = (f"{found[name] / 1e6:,.1f}" for name in ("held_bytes", "peak_bytes", "max_bytes"))
    return (
        f"{found['requests']} in flight, {found['waiting']} waiting; {held} of {budget} MB held, at most {peak}, "
        f"{found['free_share']:.0%} free; {found['generated_tokens']:,} tokens served, {rate:,.1f}/s{reused}"
    )
