"""A server in this process, and a client for it."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batching import LOSSLESS, check_empty, chunks, request_config
from live_server import ENDLESS
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv import PrefixStore
from hf_diffkv.running.models import TINY_LM

httpx = pytest.importorskip("httpx")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)
from hf_diffkv_serving.server.app import build_app  # noqa: E402
from hf_diffkv_serving.server.logs import ServerLog  # noqa: E402
from hf_diffkv_serving.server.operation import Operation, ServerApp  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

PROMPT = "@oak=5305 @elm=1177 ?elm="
NEW = 6
# of time, where a test waits for what must come
PATIENCE = 60


@functools.cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


class Client(httpx.AsyncClient):
    """Asks a server in this process.

    Attributes:
        lines: function that returns the lines logged so far.
    """

    def __init__(self, served: ServerApp, engine: Any, lines: Callable[[], list[dict]]) -> None:
        super().__init__(transport=httpx.ASGITransport(served), base_url="http://here", timeout=PATIENCE)
        self.served, self.engine, self.lines = served, engine, lines

    async def complete(self, new: int | None = NEW, **fields: Any) -> Any:
        headers = fields.pop("headers", None)
        body = {"prompt": PROMPT, "max_tokens": new, **fields}
        return await self.post("/v1/completions", json=body, headers=headers)

    def endless(self, **fields: Any) -> asyncio.Task:
        """An answer that takes longer than any test."""
        return asyncio.ensure_future(self.complete(None, **ENDLESS, **fields))

    async def metrics(self) -> dict[tuple, float]:
        """Values by name and values of labels."""
        answer = await self.get("/metrics")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(answer.text)
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    async def until(self, done: Callable[[], Any]) -> None:
        limit = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Waits until no request runs or waits."""

        def is_idle() -> bool:
            memory = self.engine.memory()
            return memory.requests == self.engine.waiting == 0 and memory.free_share == 1

        await self.until(is_idle)


def serving(capfd: pytest.CaptureFixture) -> Iterator[Callable]:
    """Yields a function that runs `use` with a client of a server with some options."""
    started = []

    @contextmanager
    def running(operation: Operation, prefixes: bool, requests: int) -> Iterator[Client]:
        engine = model().init_continuous_batching(request_config(LOSSLESS), chunks(max_requests_per_batch=requests))
        if prefixes:
            engine.use_prefixes(PrefixStore(model(), LOSSLESS, device_bytes=4 << 20))
        served = ServerApp(build_app("tiny-lm", model(), tokenizer(), engine), engine, operation, ServerLog("json"))
        written: list[dict] = []

        def lines() -> list[dict]:
            written.extend(json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{"))
            return written

        started.append(engine)
        engine.start()
        yield Client(served, engine, lines)

    def run(
        use: Callable[[Client], Awaitable[None]], prefixes: bool = False, requests: int = 4, **options: Any
    ) -> None:
        async def with_client() -> None:
            with running(Operation(**options), prefixes, requests) as client:
                async with client:
                    await use(client)

        asyncio.run(with_client())

    yield run
    for engine in started:
        cache = engine.batch_processor and engine.batch_processor.cache
        engine.stop(hard_stop=True)
        if cache:
            check_empty(cache.slots)
