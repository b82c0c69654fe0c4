"""Runs the application until it is stopped, and logs statistics at intervals."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from transformers.utils import logging

from ..batching.manager import DiffKVBatchingManager
from .app import statistics
from .drain import Server
from .logs import ServerLog
from .operation import Operation, ServerApp


def run(app: Any, engine: DiffKVBatchingManager, listener: socket.socket, operation: Operation, log: ServerLog) -> None:
    """Serves `app` until the process is interrupted; the engine runs meanwhile.

    Args:
        listener: socket that is bound to an address.
    """
    logging.set_verbosity(logging.log_levels[operation.log_level])
    served = ServerApp(app, engine, operation, log)
    # JSON is written by the log's own handlers
    own = {"log_config": None} if log.json else {}
    server = Server(uvicorn.Config(served, log_level=operation.log_level, **own), served)
    # existing objects stay, and garbage collections that scan them would delay every answer
    gc.freeze()
    with server.signals():
        engine.start()
        try:
            with _lines(engine, log, operation.log_every):
                server.run(sockets=[listener])
        finally:
            gc.unfreeze()
            # their loop is closed, and the engine has yet to drop its work for clients that were cut off
            engine.output_router.result_handlers.clear()
            engine.stop(hard_stop=True)
            if engine.prefixes is not None and engine.prefixes.has_folder:
                engine.prefixes.save()
    log.message("stopped")


@contextmanager
def _lines(engine: DiffKVBatchingManager, log: ServerLog, every: float) -> Iterator[None]:
    """Logs statistics within the block every `every` seconds if they have changed."""
    over = threading.Event()

    def write() -> None:
        last, since = statistics(engine), time.monotonic()
        while not over.wait(every):
            found, at = statistics(engine), time.monotonic()
            if found and found != last:
                rate = (found["generated_tokens"] - last.get("generated_tokens", 0)) / (at - since)
                log.statistics(found, line(found, rate))
            last, since = found, at

    if every:
        threading.Thread(target=write, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def line(found: dict[str, Any], rate: float) -> str:
    """Formats the result of `statistics` as a line of text.

    Args:
        rate: tokens per second.
    """
    reused = f", {found['prefixes']['tokens_reused']:,} of prompts reused" if "prefixes" in found else ""
    precise = (
        "" if found["until_full"] is None else f", {found['precise_share']:.0%} of tokens at {found['until_full']}"
    )
    held, peak, budget = (f"{found[name] / 1e6:,.1f}" for name in ("held_bytes", "peak_bytes", "max_bytes"))
    return (
        f"{found['requests']} in flight, {found['waiting']} waiting; {held} of {budget} MB held, at most {peak}, "
        f"{found['free_share']:.0%} free{precise}; {found['generated_tokens']:,} tokens served, {rate:,.1f}/s{reused}"
    )
