"""What the server writes on stderr: a line for each request and others, for people or as JSON."""

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
    """What is said of one request when its answer is complete. Times in seconds since it came.

    Attributes:
        id: `x-request-id`. status: of HTTP; 499 where the client went away before there was one.
        prompt_tokens, generated_tokens: of all its prompts and answers. cached_tokens: of its prompts, from prefixes.
        first_token_seconds: until the first token; None where there was none.
        finish_reason: of its answers, several with commas; None where there is none.
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
        """For people."""
        parts = [f"{self.method} {self.path} {self.status}"]
        if self.finish_reason is not None:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"{self.prompt_tokens} prompt tokens{cached}, {self.generated_tokens} new")
            parts.append(self.finish_reason)
        if self.first_token_seconds is not None:
            parts.append(f"first token after {self.first_token_seconds:.2f} s")
        # what a client calls its request may be anything
        return f"{', '.join(parts)}, {self.seconds:.2f} s, {self.id!r}"


class ServerLog:
    """Writes lines.

    Args:
        form: "text" is for people, "json" has one object in each line, with "time" and "event".
        quiet: nothing in "text".

    Attributes:
        json: whether that is the form.
    """

    def __init__(self, form: LogFormat = "text", quiet: bool = False) -> None:
        self.json, self._quiet = form == "json", quiet

    def request(self, line: RequestLine) -> None:
        """An answer is complete."""
        fields = {name: value for name, value in vars(line).items() if value is not None}
        fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
        self._write("request", fields, str(line))

    def statistics(self, found: dict[str, Any], text: str) -> None:
        """What `app.statistics` found, and the same for people."""
        self._write("statistics", found, text)

    def message(self, text: str, shown: str | None = None) -> None:
        """What happens to the server.

        Args:
            shown: what people read, where it is laid out otherwise.
        """
        self._write("message", {"message": text}, text if shown is None else shown)

    def take_over(self) -> None:
        """Has what others log come as JSON, too, where that is the form."""
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
