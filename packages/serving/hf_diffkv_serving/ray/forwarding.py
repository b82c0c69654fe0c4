"""Forwards requests to replicas, and asks another replica if one dies before its answer has begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from .beginnings import Wanted, beginnings

# replicas that may die with a request before its client gets an error
ATTEMPTS = 4
# plain fields of a scope
PLAIN = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
STREAM = b"text/event-stream"


class Forwarding:
    """Passes HTTP on to replicas.

    Args:
        replicas: handle of their deployment.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True).answer

    async def __call__(self, request: Request) -> Response:
        """Returns a replica's answer, 503 if one after another dies, or 429 if too many requests wait."""
        body = await request.body()
        scope = {name: request.scope[name] for name in PLAIN if name in request.scope}
        wanted = Wanted(beginnings(_parsed(body)), request.query_params.get("replica"))
        for _ in range(ATTEMPTS):
            answer = ForwardedAnswer(self._replicas.remote(wanted, scope, body))
            try:
                await answer.begin()
            except RayActorError:
                continue
            except asyncio.CancelledError:
                # the client has disconnected
                answer.cancel()
                raise
            except BackPressureError as error:
                return _refusal(429, "rate_limit_error", str(error), {"retry-after": "1"})
            return answer.response()
        return _refusal(503, "server_error", f"{ATTEMPTS} replicas ended one after another with this request.")


class ForwardedAnswer:
    """Answer of a replica, read up to its first bytes and then to its end.

    Args:
        messages: stream of lists of ASGI messages.
    """

    def __init__(self, messages: Any) -> None:
        self._messages = messages
        self._start: dict[str, Any] = {}
        self._begun = b""
        self._more = True

    async def begin(self) -> None:
        """Waits for the first bytes. Raises `RayActorError` if the replica dies first; nothing is lost then."""
        while self._more and not self._begun:
            self._begun = self._take(await anext(self._messages))

    def response(self) -> Response:
        """Returns the response for the client, after `begin`."""
        if self._more:
            response: Response = StreamingResponse(self._rest(), self._start["status"])
        else:
            response = Response(self._begun, self._start["status"])
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        own = [(name, value) for name, value in response.raw_headers if name == b"content-length"]
        response.raw_headers = [*headers, *own]
        return response

    def cancel(self) -> None:
        """Makes the replica end the request."""
        self._messages.cancel()

    async def _rest(self) -> AsyncIterator[bytes]:
        yield self._begun
        try:
            while self._more:
                if found := self._take(await anext(self._messages)):
                    yield found
        except RayActorError:
            headers = dict(self._start["headers"])
            if STREAM not in headers.get(b"content-type", b""):
                raise
            yield _event("the replica that answered has ended; try again.")
        finally:
            self.cancel()

    def _take(self, messages: list[dict[str, Any]]) -> bytes:
        """Notes the start message of an answer, and returns the bytes that follow."""
        found = []
        for message in messages:
            if message["type"] == "http.response.start":
                self._start = message
            else:
                found.append(message.get("body", b""))
                self._more = message.get("more_body", False)
        return b"".join(found)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _error(kind: str, reason: str) -> dict[str, Any]:
    return {"error": {"message": reason, "type": kind, "param": None, "code": None}}


def _event(reason: str) -> bytes:
    """Returns a stream event that clients of OpenAI's protocol raise as an error."""
    return f"event: error\ndata: {json.dumps(_error('server_error', reason))}\n\n".encode()


def _refusal(status: int, kind: str, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(_error(kind, reason), status, headers)
