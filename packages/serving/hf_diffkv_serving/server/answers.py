"""Parts shared by the answers of all routes: the base class, token counts, logprobs and stream events."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse

from ..batching.sampling import Sampling, TokenLogprobs
from .errors import RefusedError
from .generation import Asked, Generation, Run, Step
from .text import NO_CHARACTER

# how OpenAI's protocol writes the logarithm of 0
NEVER = -9999.0


@dataclass(frozen=True)
class Served:
    """Model and engine that answer all requests.

    Attributes:
        name: name by which clients request the model.
    """

    name: str
    model: Any
    generation: Generation

    @property
    def tokenizer(self) -> Any:
        return self.generation.tokenizer


@dataclass(frozen=True)
class Answer(ABC):
    """Answer to one request. Each route has a subclass with its format.

    Attributes:
        body: validated body of the request.
        created: seconds since 1970.
    """

    served: Served
    body: Any
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def asked(self, usual: Sampling) -> Asked:
        """Returns the request for the engine. Called on a separate thread. Raises `RefusedError`.

        Args:
            usual: sampling for the fields that the body leaves out.
        """

    @abstractmethod
    def whole(self, run: Run, answers: list[Step]) -> dict[str, Any]:
        """Returns the object to send if no stream is requested."""

    @abstractmethod
    def events(self, run: Run) -> AsyncIterator[str]:
        """Yields the events of a stream."""

    @abstractmethod
    def failed(self, error: RefusedError) -> str:
        """Returns the event that ends a stream if the engine fails."""

    async def response(self) -> Response:
        """Returns the response. Raises `RefusedError` before anything is sent."""
        wanted = self.body.model
        if wanted is not None and wanted != self.served.name:
            reason = f"the model {wanted!r} does not exist; this server has {self.served.name!r}."
            raise RefusedError(404, reason, "model", "model_not_found")
        generation = self.served.generation
        # a long text takes seconds to tokenise; other clients are answered meanwhile
        asked = await asyncio.to_thread(self.asked, generation.sampling)
        run = await generation.start(self.request_id, asked)
        if self.body.stream:
            return StreamingResponse(self._stream(run), media_type="text/event-stream")
        return json_response(self.whole(run, await run.collect()))

    async def _stream(self, run: Run) -> AsyncIterator[str]:
        try:
            async for found in self.events(run):
                yield found
        except RefusedError as error:
            yield self.failed(error)
        finally:
            run.close()

    def logprobs(self, token: int, logprob: float) -> dict[str, Any]:
        """Returns the logprob of one token. Its bytes are null if the token is only part of a character."""
        text = self.served.tokenizer.decode([token])
        raw = None if NO_CHARACTER in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, NEVER), "bytes": raw}

    def with_top(self, token: int, found: TokenLogprobs) -> dict[str, Any]:
        """Returns `logprobs` of a token along with the likeliest tokens at its position."""
        return {**self.logprobs(token, found.logprob), "top_logprobs": [self.logprobs(*each) for each in found.top]}


def json_response(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def event(content: Any, name: str | None = None) -> str:
    """Formats a server-sent event."""
    return ("" if name is None else f"event: {name}\n") + f"data: {json.dumps(content)}\n\n"


def usage_of(run: Run) -> dict[str, Any]:
    """Token counts of all answers together."""
    return {
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "total_tokens": run.prompt_tokens + run.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
    }
