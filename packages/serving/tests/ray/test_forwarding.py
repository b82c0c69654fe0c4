"""Answers to clients from replicas that answer, refuse and die. Lists of messages stand for replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip(
    "ray.serve", reason="Ray is not installed: pip install -e 'packages/serving[ray]'", exc_type=ImportError
)
httpx = pytest.importorskip("httpx")

from fastapi import FastAPI, Request, Response  # noqa: E402
from hf_diffkv_serving.ray.beginnings import beginnings  # noqa: E402
from hf_diffkv_serving.ray.forwarding import ATTEMPTS, Forwarding  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402

pytestmark = pytest.mark.slow
SSE = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"5")]
DIES = RayActorError()


def start(headers: list, status: int = 200) -> dict:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Stream:
    """Messages, or an error in their place, as from a handle of Ray Serve."""

    def __init__(self, steps: list) -> None:
        self._steps, self.cancelled = list(steps), False

    async def __anext__(self) -> list[dict]:
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Gives one stream after another, and notes what was asked."""

    def __init__(self, *streams: list) -> None:
        self.streams, self.asked = [Stream(steps) for steps in streams], []

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    @property
    def answer(self) -> Handle:
        return self

    def remote(self, *asked: Any) -> Stream:
        self.asked.append(asked)
        return self.streams[len(self.asked) - 1]


def ask(handle: Handle, path: str = "/v1/completions", content: Any = None) -> httpx.Response:
    app, forwarding = FastAPI(), Forwarding(handle)

    @app.post("/{path:path}")
    async def forward(request: Request) -> Response:
        return await forwarding(request)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=content)

    return asyncio.run(send())


def test_answers_pass_as_they_are() -> None:
    handle = Handle([[start(JSON, 400)], [body(b'{"a":1}', False)]])
    content = {"prompt": "a" * 600}
    response = ask(handle, "/v1/completions?replica=r2", content)
    assert (response.status_code, response.json()) == (400, {"a": 1})
    assert response.headers["content-length"] == "7" and response.headers["content-type"] == "application/json"
    ((wanted, scope, sent),) = handle.asked
    assert wanted.keys == beginnings(content) and wanted.replica == "r2" and json.loads(sent) == content
    assert scope["method"] == "POST" and scope["path"] == "/v1/completions"


def test_a_stream_passes_piece_by_piece() -> None:
    handle = Handle([[start(SSE)], [body(b"data: 1\n\n"), body(b"data: 2\n\n")], [body(b"data: [DONE]\n\n", False)]])
    response = ask(handle, content={"stream": True})
    assert response.text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert "content-length" not in response.headers and response.headers["content-type"] == "text/event-stream"
    assert handle.streams[0].cancelled


@pytest.mark.parametrize("dead", [[DIES], [[start(SSE)], DIES], [[start(SSE), body(b"")], DIES]])
def test_a_replica_that_dies_before_the_first_byte_is_not_noticed(dead: list) -> None:
    handle = Handle(dead, dead, [[start(JSON), body(b'"yes"', False)]])
    assert ask(handle, content={}).text == '"yes"'
    assert len(handle.asked) == 3 and len({id(asked[1]) for asked in handle.asked}) == 1


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    handle = Handle([[start(SSE), body(b"data: 1\n\n")], DIES])
    first, last = ask(handle, content={}).text.removesuffix("\n\n").split("\n\n")
    assert first == "data: 1"
    event, data = last.split("\n")
    assert event == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "has ended; try again" in error["message"]
    assert len(handle.asked) == 1


def test_another_answer_that_breaks_off_is_no_whole_one() -> None:
    handle = Handle([[start(JSON), body(b"12")], DIES])
    with pytest.raises(RayActorError):
        ask(handle, content={})


def test_refusals() -> None:
    response = ask(Handle(*[[DIES]] * ATTEMPTS), content={})
    assert response.status_code == 503 and "one after another" in response.json()["error"]["message"]
    response = ask(Handle([BackPressureError(num_queued_requests=9, max_queued_requests=8)]), content={})
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
