"""A server whose queue is short refuses what would wait for memory, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

pytest.importorskip("httpx")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)
from operated_server import PROMPT, Client  # noqa: E402


def test_a_full_queue(served: Callable) -> None:
    async def use(client: Client) -> None:
        tasks = [client.endless() for _ in range(3)]
        await client.until(lambda: client.engine.statistics().waiting == 2)
        answer = await client.complete()
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        assert (await client.get("/v1/models")).status_code == 200
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await client.idle()
        assert (await client.complete()).status_code == 200
        assert (await client.metrics())["hf_diffkv_http_requests_total", "/v1/completions", "429"] == 1

    served(use, requests=1, max_queue=2)


def test_a_short_queue_does_not_refuse_what_there_is_memory_for(served: Callable) -> None:
    """Requests that wait while others compute a beginning they share do not wait for memory."""

    async def use(client: Client) -> None:
        tasks = [asyncio.ensure_future(client.complete(prompt=PROMPT * 30)) for _ in range(6)]
        await client.until(lambda: client.engine._held_up > 2)
        assert (await client.complete()).status_code == 200
        assert [(await task).status_code for task in tasks] == [200] * 6

    served(use, prefixes=True, requests=12, max_queue=1)


@pytest.mark.slow
def test_no_queue_takes_what_there_are_slots_for(served: Callable) -> None:
    async def use(client: Client) -> None:
        answers = await asyncio.gather(*(client.complete() for _ in range(9)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 3 + [429] * 6

    served(use, requests=3, max_queue=0)
