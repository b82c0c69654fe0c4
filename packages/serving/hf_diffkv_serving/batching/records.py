"""Records of requests in the engine: their tokens and times, and the reason why they ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """Record of a request, which the engine fills in.

    Attributes:
        prompt_tokens: number of tokens of its prompt.
        boundaries: numbers of prompt tokens after which its sender wants a part to end.
        cached_tokens: number of prompt tokens that came from a kept prefix.
        generated_tokens: number of tokens of its answer so far.
        created, first_token, last_token, ended: times of `time.perf_counter`; None for what has not happened.
        finish_reason: reason why it ended: "stop" at an end-of-text token, "length" at its limit, "cancelled", "error",
            or the argument of `DiffKVBatchingManager.end_request`; None while it is under way.
        ending: whether `end_request` was called for it.
    """

    request_id: str
    prompt_tokens: int
    boundaries: tuple[int, ...] = ()
    cached_tokens: int = 0
    generated_tokens: int = 0
    created: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    finish_reason: str | None = None
    ending: bool = False


# list for the records of requests added in this context; none by default
brought: ContextVar[list[RequestRecord] | None] = ContextVar("brought", default=None)


class Records:
    """Records of the requests under way, by name. Calls for unknown names are ignored.

    Attributes:
        ended: function called with each record when it ends, on the engine's thread.
    """

    def __init__(self) -> None:
        self.ended: Callable[[RequestRecord], None] | None = None
        self._open: dict[str, RequestRecord] = {}

    def open(self, request_id: str, prompt_tokens: int, boundaries: tuple[int, ...] = ()) -> RequestRecord:
        """Returns the record of an added request, which is an existing one if it is under way."""
        record = self._open.get(request_id)
        if record is None:
            record = self._open[request_id] = RequestRecord(request_id, prompt_tokens, boundaries)
        return record

    def get(self, request_id: str) -> RequestRecord | None:
        """Returns the record of a request under way, or None."""
        return self._open.get(request_id)

    def note_prefix(self, request_id: str, tokens: int) -> None:
        """Notes tokens that need not be computed, unless the request starts over after it has generated tokens."""
        record = self._open.get(request_id)
        if record is not None and not record.generated_tokens:
            record.cached_tokens = tokens

    def note_token(self, request_id: str) -> None:
        """Notes one more token of an answer."""
        record = self._open.get(request_id)
        if record is not None:
            record.last_token = time.perf_counter()
            record.first_token = record.first_token or record.last_token
            record.generated_tokens += 1

    def close(self, request_id: str, finish_reason: str) -> None:
        """Ends a record. A finish reason that it already has is kept."""
        record = self._open.pop(request_id, None)
        if record is None:
            return
        record.ended = time.perf_counter()
        record.finish_reason = record.finish_reason or finish_reason
        if self.ended is not None:
            self.ended(record)
