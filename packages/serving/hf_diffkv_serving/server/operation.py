"""Layers between clients and the application: limits, health, metrics, and a log line for each request."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ..batching.manager import DiffKVBatchingManager
from ..batching.records import RequestRecord, brought
from .app import REQUEST_ID
from .health import Health
from .limits import Admission, ApiKey, BodyLimit
from .logs import RequestLine, ServerLog
from .metrics import Metrics
from .under_way import Receive, Send, UnderWay

REQUEST_ID_HEADER = REQUEST_ID.encode()
HEALTH, METRICS = "/health", "/metrics"
# enough for a prompt of a million token ids
MAX_BODY = 16_000_000
# of an answer whose client disconnected before it began
CLIENT_GONE = 499


@dataclass(frozen=True)
class Operation:
    """Options of a running server.

    Attributes:
        cors: whether to accept web pages of any origin.
        api_key: key that clients must send; None admits all.
        open_metrics: whether `/metrics` needs no key.
        max_queue: maximum number of waiting requests; None for no limit.
        max_body: maximum bytes of a request's body.
        timeout: maximum seconds per answer; None for no limit.
        grace: seconds that answers under way have to finish when the server is stopped.
        log_level: log level of uvicorn and Transformers.
        log_every: seconds between lines of statistics; 0 for none.
    """

    cors: bool = False
    api_key: str | None = field(default=None, repr=False)
    open_metrics: bool = False
    max_queue: int | None = None
    max_body: int = MAX_BODY
    timeout: float | None = None
    grace: float = 30.0
    log_level: str = "error"
    log_every: float = 10.0


class ServerApp:
    """ASGI application: limits, health, metrics and logs around the application that answers requests.

    Args:
        app: application that answers requests, and ends those of a client that disconnects.
        engine: engine of the application.
    """

    def __init__(self, app: Any, engine: DiffKVBatchingManager, operation: Operation, log: ServerLog) -> None:
        self.log, self.health = log, Health(engine, operation.grace)
        self.metrics = Metrics(engine, self.health)
        self.under_way = UnderWay(app, engine, operation.timeout)
        admission = Admission(self.under_way, engine, self.health, operation.max_queue)
        free = (HEALTH, METRICS) if operation.open_metrics else (HEALTH,)
        pages = _Pages(admission, self.health, self.metrics)
        self._app: Any = ApiKey(BodyLimit(pages, operation.max_body), operation.api_key, free)
        if operation.cors:
            # also around refusals, which web pages could not read otherwise
            self._app = CORSMiddleware(self._app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status, records = time.perf_counter(), CLIENT_GONE, []
        request_id = dict(scope["headers"]).get(REQUEST_ID_HEADER) or str(uuid.uuid4()).encode()
        headers = [each for each in scope["headers"] if each[0] != REQUEST_ID_HEADER]
        scope = {**scope, "headers": [*headers, (REQUEST_ID_HEADER, request_id)]}

        async def reply(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                others = [each for each in message.get("headers", []) if each[0].lower() != REQUEST_ID_HEADER]
                message = {**message, "headers": [*others, (REQUEST_ID_HEADER, request_id)]}
            await send(message)

        brought.set(records)
        try:
            await self._app(scope, receive, reply)
        finally:
            self._note(scope, request_id.decode("latin-1"), status, began, records)

    def _note(self, scope: dict, request_id: str, status: int, began: float, records: list[RequestRecord]) -> None:
        if not scope["path"].startswith("/v1/"):
            return
        self.metrics.note_answer(scope["path"], status)
        firsts = [record.first_token - began for record in records if record.first_token is not None]
        reasons = dict.fromkeys(record.finish_reason or "cancelled" for record in records)
        line = RequestLine(
            id=request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=time.perf_counter() - began,
            prompt_tokens=sum(record.prompt_tokens for record in records),
            cached_tokens=sum(record.cached_tokens for record in records),
            generated_tokens=sum(record.generated_tokens for record in records),
            first_token_seconds=min(firsts, default=None),
            finish_reason=",".join(reasons) or None,
        )
        self.log.request(line)


class _Pages:
    """ASGI middleware that serves `/health` and `/metrics`."""

    def __init__(self, app: Any, health: Health, metrics: Metrics) -> None:
        self._app, self._health, self._metrics = app, health, metrics

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or scope["path"] not in (HEALTH, METRICS):
            return await self._app(scope, receive, send)
        if scope["path"] == HEALTH:
            status, content = self._health.answer()
            response = Response(json.dumps(content), status, media_type="application/json")
        else:
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            # the prefix store may be busy with its files
            text, content_type = await asyncio.to_thread(self._metrics.text, accept)
            response = Response(text, headers={"content-type": content_type})
        await response(scope, receive, send)
