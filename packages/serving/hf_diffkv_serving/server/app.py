"""The application: routes of OpenAI's protocol, one for statistics, and the handling of disconnects."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request

from ..batching.manager import DiffKVBatchingManager
from ..batching.sampling import Sampling

# rejects releases with a different server
from . import parts  # noqa: F401, I001
from .answers import Answer, Served
from .chat import ChatAnswer, ChatBody
from .completions import CompletionAnswer, CompletionBody
from .errors import RESPONSES, RefusedError, add_handlers
from .generation import Generation, submitted
from .markup import drop_invalid_template
from .responses import ResponseAnswer, ResponseBody

STATISTICS = "/diffkv"
REQUEST_ID = "x-request-id"


def build_app(
    name: str,
    model: Any,
    tokenizer: Any,
    engine: DiffKVBatchingManager,
    sampling: Sampling | None = None,
    seed: int | None = None,
) -> FastAPI:
    """Returns an application that serves `model` through `engine`, which has been started.

    Args:
        name: name by which clients request the model.
        tokenizer: fast tokenizer of the model.
        sampling: sampling for requests that do not set their own; None uses that of `model.generation_config`.
        seed: seed from which requests without one get theirs; None for a random one.
    """
    usual = Sampling.of(model.generation_config) if sampling is None else sampling
    drop_invalid_template(tokenizer, model)
    generation = Generation(engine, tokenizer, usual, seed)
    app = FastAPI(title="hf-diffkv", responses=RESPONSES)
    add_handlers(app)
    _add_answers(app, Served(name, model, generation))
    _add_models(app, name)
    app.add_api_route(STATISTICS, lambda: statistics(engine), methods=["GET"])
    app.add_middleware(Disconnection, gone=generation.forget)
    return app


def _add_answers(app: FastAPI, served: Served) -> None:
    async def answer(form: type[Answer], body: Any, request: Request) -> Any:
        request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        return await form(served, body, request_id).response()

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Any:
        return await answer(ChatAnswer, body, request)

    @app.post("/v1/completions")
    async def completion(request: Request, body: CompletionBody) -> Any:
        return await answer(CompletionAnswer, body, request)

    @app.post("/v1/responses")
    async def response(request: Request, body: ResponseBody) -> Any:
        return await answer(ResponseAnswer, body, request)


def _add_models(app: FastAPI, name: str) -> None:
    known = {"id": name, "object": "model", "created": 0, "owned_by": "hf-diffkv"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [known]}

    # names on the Hub have slashes
    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> dict[str, Any]:
        if asked != name:
            reason = f"the model {asked!r} does not exist; this server has {name!r}."
            raise RefusedError(404, reason, "model", "model_not_found")
        return known


def statistics(engine: DiffKVBatchingManager) -> dict[str, Any]:
    """Returns the fields of the engine's `ServingStatistics` and `ServingMemory` in one dict.

    If prefixes are kept, "prefixes" has their number and the fields of `PrefixStats`.
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
    """ASGI middleware that ends a client's requests if it disconnects, whether it was waiting or reading.

    Args:
        app: application that the middleware wraps.
        gone: function called with the id of each request that was submitted to the engine for the client.
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
            # servers also report a disconnect after everything was sent
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
