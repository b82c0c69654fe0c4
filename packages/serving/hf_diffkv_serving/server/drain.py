"""Graceful shutdown: answers under way get time to finish, and every client gets a final message."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from .operation import ServerApp

# seconds that connections have to close once all answers are complete
CLOSING = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Stops at the first signal once the answers under way are complete, and at the second immediately.

    Until then, it tells new clients that it is stopping, so that load balancers notice.

    Args:
        config: uvicorn's configuration for `served`.
    """

    def __init__(self, config: uvicorn.Config, served: ServerApp) -> None:
        config.timeout_graceful_shutdown = CLOSING
        super().__init__(config)
        self._served = served
        self._ended = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: `signals` does, also before and after uvicorn runs."""
        yield

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles signals within the block: they stop the server."""
        before = {each: signal.signal(each, self.handle_exit) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        health, answers = self._served.health, self._served.under_way.answers
        if health.draining_since is not None:
            self._served.log.message("stopped at once")
            sys.stderr.flush()
            # the engine's threads would otherwise finish their forward
            os._exit(128 + sig)
        health.drain()
        self._served.log.message(
            f"stopping: answers in progress ({len(answers)}) have up to {health.grace:g} s; another signal stops at "
            "once"
        )

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to exit. uvicorn calls it ten times a second."""
        health, under_way = self._served.health, self._served.under_way
        if health.draining_since is not None:
            if health.grace_left <= 0 and not self._ended:
                self._ended = True
                under_way.end_all()
            # no answer stays longer than its last events take
            self.should_exit = not under_way.answers
        return await super().on_tick(counter)
