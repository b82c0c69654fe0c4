"""One replica: a model, its engine, and the application of `hf-diffkv serve`, which it runs request by request."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from ray import serve

from ..batching.sampling import Sampling
from ..server.app import build_app
from ..server.logs import LogFormat, ServerLog
from ..server.operation import Operation, ServerApp
from .beginnings import Wanted
from .engine import EngineOptions, load_engine

# says which replica answered
REPLICA_HEADER = b"x-replica"


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of the server in a replica.

    Attributes:
        name: name by which clients request the model; None for `EngineOptions.model`.
        chat_template: template that replaces the tokenizer's.
        seed: seed from which requests without one get theirs; None for a random one.
        operation: key, limits and times of each replica.
        log_format: format of the replicas' logs, "text" or "json".
    """

    name: str | None = None
    chat_template: str | None = None
    seed: int | None = None
    operation: Operation = Operation()
    log_format: LogFormat = "text"


class Replica:
    """Serves one model. Ray Serve makes as many replicas as are wanted.

    Args:
        options: options of its engine. `generation` is for requests that do not set their own sampling.
        served: options of its server.

    Raises:
        EvaluationError, ValueError, MemoryError: raised by `load_engine`. Ray Serve tries again, then reports it.
    """

    def __init__(self, options: EngineOptions, served: ReplicaOptions) -> None:
        # each request has its own sampling; the engine's setting would apply to all of them
        loaded = load_engine(replace(options, generation={"do_sample": False}))
        self._engine = loaded.manager
        loaded.start()
        if served.chat_template is not None:
            loaded.tokenizer.chat_template = served.chat_template
        usual = copy.deepcopy(loaded.model.generation_config)
        usual.update(**options.generation)
        name, sampling = served.name or options.model, Sampling.of(usual)
        app = build_app(name, loaded.model, loaded.tokenizer, self._engine, sampling, served.seed)
        self._app = ServerApp(app, self._engine, served.operation, ServerLog(served.log_format))
        self._name = serve.get_replica_context().replica_id.unique_id
        self._ending: set[asyncio.Task] = set()

    def check_health(self) -> None:
        """Raises `RuntimeError` if the engine has ended, upon which Ray Serve replaces this replica."""
        if not self._engine.is_running():
            raise RuntimeError(f"the engine has ended: {self._engine.failure}")

    async def answer(self, wanted: Wanted, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields the ASGI messages that answer a request, in lists of those that have come since the last list.

        A caller that stops reading ends the request.

        Args:
            wanted: preferences of the request, which only the router reads.
            scope, body: ASGI scope and body of the request.
        """
        sent: asyncio.Queue[dict | None] = asyncio.Queue()
        asked, gone = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

        async def receive() -> dict:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (REPLICA_HEADER, self._name.encode())]}
            sent.put_nowait(message)

        running = asyncio.ensure_future(self._app(scope, receive, send))
        self._ending.add(running)
        running.add_done_callback(self._ending.discard)
        running.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            ended = False
            while not ended:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                ended = messages[-1] is None
                if found := [message for message in messages if message is not None]:
                    yield found
            running.result()
        finally:
            gone.set()
