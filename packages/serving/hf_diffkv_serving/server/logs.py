"""Lines that the server writes to stderr for each request and for other events, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from transformers.utils import logging as transformers_logging

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class RequestLine:
    """Fields of the line for a request whose answer is complete. Times are in seconds since the request arrived.

    Attributes:
        id: `x-request-id`.
        status: HTTP status; 499 if the client disconnected before there was one.
        seconds: time at which the answer ended.
        prompt_tokens: number of tokens in all its prompts.
        cached_tokens: number of prompt tokens that came from prefixes.
        generated_tokens: number of tokens in all its answers.
        first_token_seconds: time of the first token; None if there was none.
        finish_reason: finish reasons of its answers, separated by commas; None if there is none.
    """

    id: str
    method: str
    path: str
    status: int
    seconds: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_seconds: float | None = None
    finish_reason: str | None = None

    def __str__(self) -> str:
        """Formats the line as text."""
        parts = [f"{self.method} {self.path} {self.status}"]
        if self.finish_reason is not None:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"{self.prompt_tokens} prompt tokens{cached}, {self.generated_tokens} new")
            parts.append(self.finish_reason)
        if self.first_token_seconds is not None:
            parts.append(f"first token after {self.first_token_seconds:.2f} s")
        # a client may choose any id
        return f"{', '.join(parts)}, {self.seconds:.2f} s, {self.id!r}"


class ServerLog:
    """Writes lines to stderr.

    Args:
        form: "text", or "json" for one object per line, with "time" and "event".
        quiet: whether to write nothing in "text".

    Attributes:
        json: whether the form is "json".
    """

    def __init__(self, form: LogFormat = "text", quiet: bool = False) -> None:
        self.json, self._quiet = form == "json", quiet

    def request(self, line: RequestLine) -> None:
        """Writes the line of an answered request."""
        fields = {name: value for name, value in vars(line).items() if value is not None}
        fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
        self._write("request", fields, str(line))

    def statistics(self, found: dict[str, Any], text: str) -> None:
        """Writes the result of `app.statistics`, or `text` in text logs."""
        self._write("statistics", found, text)

    def message(self, text: str, shown: str | None = None) -> None:
        """Writes a message about the server.

        Args:
            shown: text to write in text logs if its layout differs.
        """
        self._write("message", {"message": text}, text if shown is None else shown)

    def take_over(self) -> None:
        """Formats other loggers' records as JSON as well, if that is the log's format."""
        if not self.json:
            return
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonFormatter())
        logging.basicConfig(handlers=[handler], force=True)
        logging.captureWarnings(True)
        transformers_logging.disable_default_handler()
        transformers_logging.enable_propagation()
        for name in ("hf_diffkv", "uvicorn", "uvicorn.error"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True

    def _write(self, event: str, fields: dict[str, Any], text: str) -> None:
        if self.json:
            text = json.dumps({"time": _now(), "event": event, **fields})
        elif self._quiet:
            return
        print(text, file=sys.stderr, flush=True)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), record.getMessage()
        fields = {"time": _now(), "event": "log", "level": level, "logger": record.name, "message": message}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
