"""Admits requests by key and size, and only while the server accepts them and not too many wait."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from typing import Any

from ..batching.manager import DiffKVBatchingManager
from .errors import RefusedError
from .health import Health
from .under_way import Receive, Send, UnderWay, asks

# seconds after which a client may try again if too many wait
RETRY_AFTER = 1


class ApiKey:
    """ASGI middleware that requires `Authorization: Bearer KEY`.

    Args:
        key: key that clients must send; None admits all.
        free: paths that need no key.
    """

    def __init__(self, app: Any, key: str | None, free: Collection[str]) -> None:
        self._app, self._free = app, free
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        # browsers ask with OPTIONS whether they may send the key
        if scope["type"] != "http" or scope["path"] in self._free or scope["method"] == "OPTIONS" or self._fits(scope):
            return await self._app(scope, receive, send)
        reason = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`."
        refusal = RefusedError(401, reason, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return await refusal.response()(scope, receive, send)

    def _fits(self, scope: dict) -> bool:
        if self._wanted is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        # in a time that does not reveal how much of the key was right
        return hmac.compare_digest(given, self._wanted)


class BodyLimit:
    """ASGI middleware that refuses requests whose body is too large, by the declared length or as soon as more has
    arrived than is allowed. The excess is never kept.

    Args:
        most: largest size in bytes.
    """

    def __init__(self, app: Any, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and int(told) > self._most:
            return await self._refusal().response()(scope, receive, send)
        came, started = 0, False

        async def limited() -> dict:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            # the application ends as if the client had disconnected
            return {"type": "http.disconnect"} if came > self._most else message

        async def reply(message: dict) -> None:
            nonlocal started
            if started or came <= self._most:
                started = True
                await send(message)

        await self._app(scope, limited, reply)
        if came > self._most and not started:
            await self._refusal().response()(scope, receive, send)

    def _refusal(self) -> RefusedError:
        reason = f"the body exceeds the {self._most:,} bytes that this server accepts; send less at once."
        return RefusedError(413, reason, code="body_too_large")


class Admission:
    """ASGI middleware that refuses API requests while the server accepts none, or those for answers if too many wait.

    Args:
        app: middleware that knows the answers under way.
        max_queue: maximum number of waiting requests; None for no limit.
    """

    def __init__(self, app: UnderWay, engine: DiffKVBatchingManager, health: Health, max_queue: int | None) -> None:
        self._app, self._engine, self._health, self._max_queue = app, engine, health, max_queue

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            return await self._app(scope, receive, send)
        return await refusal.response()(scope, receive, send)

    def _refusal(self, scope: dict) -> RefusedError | None:
        if scope["path"].startswith("/v1/"):
            refusal = self._health.refusal()
            if refusal is not None:
                return refusal
        if self._max_queue is not None and asks(scope) and self._is_full(self._max_queue):
            headers = {"retry-after": str(RETRY_AFTER)}
            reason = f"{self._max_queue} requests are already waiting; try again later."
            return RefusedError(429, reason, code="queue_full", headers=headers)
        return None

    def _is_full(self, max_queue: int) -> bool:
        # requests whose body is being read will wait too; those since the last forward may still be admitted
        coming = sum(not answer.records for answer in self._app.answers)
        return self._engine.waiting + coming >= max_queue + self._engine.places
