"""The application: Transformers' routes, one that says what is held, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from ..manager import DiffKVBatchingManager
from .parts import Generation, ServedModel, server_app, submitted

STATISTICS = "/diffkv"


def build_app(name: str, model: Any, tokenizer: Any, engine: DiffKVBatchingManager, cors: bool = False) -> Any:
    """A FastAPI application that serves `model` through `engine`, which has been started.

    Args:
        name: what clients call the model.
        cors: lets pages of any origin in.
    """
    generation = Generation(engine)
    app = server_app(ServedModel(name, model, tokenizer), generation, cors)
    app.add_api_route(STATISTICS, lambda: statistics(engine), methods=["GET"])
    app.add_middleware(Disconnection, gone=generation.forget)
    return app


def statistics(engine: DiffKVBatchingManager) -> dict[str, Any]:
    """What the engine does and holds, as `ServingStatistics` and `ServingMemory` have it, in one dict.

    Where prefixes are kept, "prefixes" says how many, and has the fields of `PrefixStats`.
    """
    found = engine.statistics()
    if found is None:
        return {}
    fields = asdict(found)
    fields = {**fields.pop("memory"), **fields}
    if engine.prefixes is not None:
        fields["prefixes"] = {"kept": len(engine.prefixes), **asdict(engine.prefixes.stats)}
    return fields


class Disconnection:
    """ASGI middleware that ends the requests of a client that goes away, whether it was waiting or reading.

    Args:
        app: what is served.
        gone: called with the id of each request that the client had brought to the engine.
    """

    def __init__(self, app: Any, gone: Callable[[str], None]) -> None:
        self._app = app
        self._gone = gone

    async def __call__(self, scope: dict, receive: Callable[[], Awaitable[dict]], send: Callable) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        messages: asyncio.Queue[dict] = asyncio.Queue()
        brought: list[str] = []
        complete = False

        async def listen() -> None:
            message: dict = {}
            while message.get("type") != "http.disconnect":
                message = await receive()
                messages.put_nowait(message)

        async def answer(message: dict) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        submitted.set(brought)
        app = asyncio.ensure_future(self._app(scope, messages.get, answer))
        listener = asyncio.ensure_future(listen())
        try:
            await asyncio.wait({app, listener}, return_when=asyncio.FIRST_COMPLETED)
            # servers say that a client is gone also when all has been sent
            if complete:
                await app
        finally:
            listener.cancel()
            if not app.done():
                app.cancel()
                for request_id in brought:
                    self._gone(request_id)
                await asyncio.wait({app})
        return None if app.cancelled() else app.result()
