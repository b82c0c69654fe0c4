"""The server stops as it is told by signals, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)
from live_server import ENDLESS, LiveServer, events  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    running = []

    def started(*options: str, **others: Any) -> LiveServer:
        running.append(LiveServer(tmp_path, "--log-format=json", "--max-length=1200", *options, **others))
        return running[-1]

    yield started
    for server in running:
        server.kill()


class Streaming(threading.Thread):
    """Reads a stream of so many tokens; waits until it has begun."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__()
        self.began = threading.Event()
        self.server, self.fields = server, fields
        self.events: list[Any] = []
        self.start()
        assert self.began.wait(60)

    def run(self) -> None:
        with self.server.stream("@oak=5305", **self.fields) as response:
            lines = response.iter_lines()
            first = [next(lines) for _ in range(4)]
            self.began.set()
            with contextlib.suppress(httpx.TransportError):
                first += lines
            self.events = events(first)

    def choices(self) -> list[dict[str, Any]]:
        """Waits for the end of the stream and returns the choices of all chunks that have some."""
        self.join(60)
        return [each["choices"][0] for each in self.events if each != "[DONE]" and each["choices"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_answers_under_way_are_completed(start: Callable, number: int) -> None:
    server = start("--grace=60")
    reading = Streaming(server, new=150, ignore_eos=True)
    server.signal(number)
    server.until(lambda: server.client.get("/health").status_code == 503)
    refused = server.complete("a")
    assert refused.status_code == 503 and refused.headers["retry-after"]
    choices = reading.choices()
    assert choices[-1]["finish_reason"] == "length" and len(choices) > 100
    assert server.wait() == 0
    text = server.errors.read_text()
    assert "Traceback" not in text and '"message": "stopped"' in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if line["event"] == "request"] == [503, 200]


def test_the_grace_is_over(start: Callable, tmp_path: Path) -> None:
    """Ends the stream of a reader, answers others with an error, and keeps prefixes for the next process."""
    server = start("--grace=0.5", "--prefix-bytes=4MB", f"--prefix-folder={tmp_path / 'prefixes'}")
    assert server.complete("@oak=5305 ?oak=").status_code == 200
    reading = Streaming(server, **ENDLESS)
    answers: list[Any] = []
    body = {"prompt": "a", **ENDLESS}
    waiting = threading.Thread(target=lambda: answers.append(server.client.post("/v1/completions", json=body)))
    waiting.start()
    server.until(lambda: server.statistics()["requests"] == 2)
    server.signal(signal.SIGTERM)
    choices = reading.choices()
    assert choices[-1]["finish_reason"] is not None and 3 < len(choices) < 1000
    waiting.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["message"]
    assert server.wait() == 0
    assert "Traceback" not in server.errors.read_text()
    assert len(list((tmp_path / "prefixes").iterdir())) > 1


def test_a_second_signal_stops_at_once(start: Callable) -> None:
    server = start("--grace=600")
    reading = Streaming(server, **ENDLESS)
    server.signal(signal.SIGINT)
    server.until(lambda: server.client.get("/health").status_code == 503)
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    text = server.errors.read_text()
    assert "Traceback" not in text and "stopped at once" in text
    reading.join(60)


def test_the_key_may_come_from_the_environment(start: Callable) -> None:
    server = start(environment={"HF_DIFFKV_API_KEY": "secret"})
    assert server.complete("a").status_code == 401
    assert server.complete("a", headers={"authorization": "Bearer secret"}).status_code == 200
    assert "secret" not in server.errors.read_text()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
