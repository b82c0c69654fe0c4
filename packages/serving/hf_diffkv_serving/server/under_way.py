"""Answers under way, each of which can be ended early: at its timeout, or when the server stops."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..batching.manager import DiffKVBatchingManager
from ..batching.records import RequestRecord, brought
from .errors import RefusedError

Receive = Callable[[], Awaitable[dict]]
Send = Callable[[dict], Awaitable[None]]
# seconds for the last events of an ended stream; a client that reads nothing gets none
LAST_EVENTS = 5.0
# seconds that the engine may take for its forward before it ends a request, and between checks
SLOWEST_FORWARD, LOOK = 60.0, 0.1


@dataclass(frozen=True)
class Ending:
    """Reason why an answer ends early.

    Attributes:
        refusal: error for a client that has read nothing yet. A client that reads a stream gets the answer so far and
            the finish reason "length".
        finish_reason: finish reason in the request's record.
    """

    refusal: RefusedError
    finish_reason: str


def timed_out(seconds: float) -> Ending:
    return Ending(RefusedError(504, f"the answer took more than {seconds:g} s.", code="timeout"), "timeout")


def shut_down() -> Ending:
    refusal = RefusedError(503, "the server stopped before the answer was complete.", headers={"retry-after": "1"})
    return Ending(refusal, "shutdown")


def asks(scope: dict) -> bool:
    """Whether an ASGI scope is a request for an answer."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/")


class UnderWay:
    """ASGI middleware that tracks all answers under way.

    Args:
        app: application that ends the requests of a client that disconnects.
        timeout: seconds that an answer may take from its request on; None for no limit.
    """

    def __init__(self, app: Any, engine: DiffKVBatchingManager, timeout: float | None) -> None:
        self._app, self._engine, self._timeout = app, engine, timeout
        self.answers: set[UnderWayAnswer] = set()

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if not asks(scope):
            return await self._app(scope, receive, send)
        # the calls below add the engine's requests to it
        records = brought.get()
        if records is None:
            brought.set(records := [])
        answer = UnderWayAnswer(self._engine, records)
        self.answers.add(answer)
        timer = None
        if self._timeout is not None:
            ending = timed_out(self._timeout)
            timer = asyncio.get_running_loop().call_later(self._timeout, functools.partial(answer.end, ending))
        try:
            await answer.run(self._app, scope, receive, send)
        finally:
            self.answers.discard(answer)
            if timer is not None:
                timer.cancel()

    def end_all(self) -> None:
        """Ends all answers because the server stops."""
        for answer in list(self.answers):
            answer.end(shut_down())


class UnderWayAnswer:
    """One answer, between its client and the application.

    Args:
        records: records of the requests that it submits to the engine, as they come.
    """

    def __init__(self, engine: DiffKVBatchingManager, records: list[RequestRecord]) -> None:
        self._engine, self.records = engine, records
        self._messages: asyncio.Queue[dict] = asyncio.Queue()
        self._started = False
        self._ending: Ending | None = None

    async def run(self, app: Any, scope: dict, receive: Receive, send: Send) -> None:
        """Runs `app` until its answer is complete or is ended."""

        async def listen() -> None:
            message: dict = {}
            while message.get("type") != "http.disconnect":
                message = await receive()
                self._messages.put_nowait(message)

        async def reply(message: dict) -> None:
            if self._started or self._ending is None:
                self._started = True
                await send(message)

        listener = asyncio.ensure_future(listen())
        try:
            await app(scope, self._messages.get, reply)
        except Exception:
            # an answer that was cut short may raise
            if self._ending is None:
                raise
        finally:
            listener.cancel()
        if self._ending is not None and not self._started:
            await self._ending.refusal.response()(scope, receive, send)

    def end(self, ending: Ending) -> None:
        """Ends the answer unless it was ended before."""
        if self._ending is not None:
            return
        self._ending = ending
        if not self._started:
            for record in self.records:
                if record.ended is None:
                    record.finish_reason = ending.finish_reason
            self._leave()
            return
        for record in self.records:
            self._engine.end_request(record.request_id, ending.finish_reason)
        self._leave_later(time.monotonic() + SLOWEST_FORWARD)

    def _leave_later(self, latest: float) -> None:
        """Leaves once the engine has ended all requests and the client had time to read their last events."""
        waits = any(record.ended is None for record in self.records) and time.monotonic() < latest
        loop = asyncio.get_running_loop()
        if waits:
            loop.call_later(LOOK, self._leave_later, latest)
        else:
            loop.call_later(LAST_EVENTS, self._leave)

    def _leave(self) -> None:
        """Tells the application that the client has disconnected."""
        self._messages.put_nowait({"type": "http.disconnect"})
