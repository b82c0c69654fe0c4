"""Clients of a soak: each sends one request, reads the response, and reports what was wrong with it."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from soak_prompts import Prompt, Reference

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# kinds of requests, in percent
KINDS = {"whole": 28, "stream": 32, "sampled": 15, "leaves": 10, "malformed": 10, "too long": 5}
MESSAGE = {"role": "user", "content": "a"}
MALFORMED: list[tuple[str, Any]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": 5}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "ten"}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -3}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "a", "model": "another"}),
    (COMPLETIONS, [1, 2]),
    (COMPLETIONS, b'{"prompt": '),
    (COMPLETIONS, b""),
    (COMPLETIONS, b"\xff\xfe\x00"),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "a"}),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}),
    (CHAT, {"messages": [{"content": "a"}]}),
    (CHAT, {"messages": [MESSAGE], "n": "two"}),
    (RESPONSES, {}),
    (RESPONSES, {"input": 7}),
    (RESPONSES, {"input": "a", "max_output_tokens": []}),
]
# from a server that has no room now, or is being stopped
TRY_LATER = {429, 503}


@dataclass
class Outcome:
    """Outcome of one request. Times are in seconds.

    Attributes:
        status: HTTP status; None if the client left before there was one, or there was no server.
        wrong: description of what is wrong; None if nothing is.
        during_restart: whether the request was sent during a restart.
        reached: whether a server was reached. If not, the request is sent again.
        compared: whether the text was compared with the reference.
        cut: whether the server properly ended the request early.
    """

    kind: str
    status: int | None = None
    wrong: str | None = None
    during_restart: bool = False
    reached: bool = True
    compared: bool = False
    cut: bool = False
    first: float | None = None
    whole: float = 0.0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


class Clients:
    """Sends requests to one server.

    Args:
        longest: maximum tokens of a request that the server accepts.
        new_tokens: maximum tokens of an answer.
    """

    def __init__(
        self, address: str, prompts: list[Prompt], reference: Reference, longest: int, new_tokens: int, seed: int
    ) -> None:
        # connections that the server may be about to close are not reused
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2)
        self._http = httpx.AsyncClient(base_url=address, timeout=300, limits=limits)
        self._prompts, self._reference = prompts, reference
        self._longest, self._new = longest, new_tokens
        self._rng = random.Random(seed)
        # while one server is being stopped and another started
        self.restarting = False

    async def close(self) -> None:
        await self._http.aclose()

    def kind(self) -> str:
        return self._rng.choices(list(KINDS), list(KINDS.values()))[0]

    async def send(self, kind: str) -> Outcome:
        """Sends one request of a kind."""
        outcome, began = Outcome(kind, during_restart=self.restarting), time.perf_counter()
        try:
            if kind == "malformed":
                await self._malformed(outcome)
            elif kind == "too long":
                await self._too_long(outcome)
            else:
                await self._ask(outcome)
        except httpx.TransportError as error:
            outcome.reached = not outcome.during_restart
            if outcome.reached:
                outcome.wrong = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError) as error:
            outcome.wrong = f"an answer of another form: {type(error).__name__}: {error}"
        outcome.whole = time.perf_counter() - began
        return outcome

    def _excused(self, outcome: Outcome) -> bool:
        """Returns whether the server may have been stopped in the meantime."""
        return self.restarting or outcome.during_restart

    async def _malformed(self, outcome: Outcome) -> None:
        path, body = self._rng.choice(MALFORMED)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._check_refused(outcome, await self._post(path, content, outcome), f"{path} {content[:60]!r}")

    async def _too_long(self, outcome: Outcome) -> None:
        body = {"prompt": "@oak=1234 " * self._longest, "stream": self._rng.random() < 0.5}
        self._check_refused(outcome, await self._post(COMPLETIONS, json.dumps(body).encode(), outcome), "too long")

    async def _post(self, path: str, content: bytes, outcome: Outcome) -> httpx.Response:
        headers = {"content-type": "application/json", "x-request-id": outcome.id}
        answer = await self._http.post(path, content=content, headers=headers)
        outcome.status = answer.status_code
        return answer

    def _check_refused(self, outcome: Outcome, answer: httpx.Response, what: str) -> None:
        if self._try_later(outcome, answer):
            return
        message = _message(answer)
        if not 400 <= answer.status_code < 500 or not message:
            outcome.wrong = f"{what}: {answer.status_code} {answer.text[:200]}"

    def _try_later(self, outcome: Outcome, answer: httpx.Response) -> bool:
        """Returns whether the server has no room or is being stopped, which it must report as the protocol requires."""
        if answer.status_code not in TRY_LATER:
            return False
        if not _message(answer) or "retry-after" not in answer.headers:
            outcome.wrong = f"{answer.status_code} without a reason or retry-after: {answer.text[:200]}"
        elif answer.status_code == 503 and not self._excused(outcome):
            outcome.wrong = f"503 though nobody stopped the server: {answer.text[:200]}"
        return True

    async def _ask(self, outcome: Outcome) -> None:
        prompt = self._rng.choice(self._prompts)
        new = self._rng.randint(1, self._new)
        stream = outcome.kind == "stream" or outcome.kind != "whole" and self._rng.random() < 0.5
        path, body = self._body(prompt, new, stream)
        if outcome.kind == "sampled":
            body |= {"temperature": self._rng.uniform(0.5, 1.5), "top_p": 0.95, "seed": self._rng.randrange(1 << 30)}
            if path == RESPONSES:
                del body["seed"]
        if not stream:
            await self._read_whole(outcome, path, body, prompt, new)
        else:
            await self._read_stream(outcome, path, body, prompt, new)

    def _body(self, prompt: Prompt, new: int, stream: bool) -> tuple[str, dict[str, Any]]:
        if not prompt.chat:
            return COMPLETIONS, {"prompt": prompt.text, "max_tokens": new, "stream": stream}
        if self._rng.random() < 0.7:
            messages = [{"role": "user", "content": prompt.text}]
            return CHAT, {"messages": messages, "max_tokens": new, "stream": stream}
        return RESPONSES, {"input": prompt.text, "max_output_tokens": new, "stream": stream}

    async def _read_whole(self, outcome: Outcome, path: str, body: dict[str, Any], prompt: Prompt, new: int) -> None:
        content = json.dumps(body).encode()
        if outcome.kind == "leaves":
            try:
                headers = {"content-type": "application/json", "x-request-id": outcome.id}
                patience = httpx.Timeout(300, read=self._rng.uniform(0.01, 0.5))
                answer = await self._http.post(path, content=content, headers=headers, timeout=patience)
            except httpx.ReadTimeout:
                return
            outcome.status = answer.status_code
        else:
            answer = await self._post(path, content, outcome)
        if self._try_later(outcome, answer):
            return
        if answer.status_code != 200:
            outcome.wrong = f"{path}: {answer.status_code} {answer.text[:200]}"
            return
        text, reason = _whole_text(path, answer.json())
        self._compare(outcome, text, reason, prompt, new)

    async def _read_stream(self, outcome: Outcome, path: str, body: dict[str, Any], prompt: Prompt, new: int) -> None:
        began, headers = time.perf_counter(), {"x-request-id": outcome.id}
        async with self._http.stream("POST", path, json=body, headers=headers) as answer:
            outcome.status = answer.status_code
            if answer.status_code != 200:
                await answer.aread()
                if not self._try_later(outcome, answer):
                    outcome.wrong = f"{path}: {answer.status_code} {answer.text[:200]}"
                return
            text, reason, ended = "", None, False
            left = self._rng.randint(0, new) if outcome.kind == "leaves" else -1
            async for piece, why, last in _pieces(path, answer):
                if piece and outcome.first is None:
                    outcome.first = time.perf_counter() - began
                text, reason, ended = text + piece, why or reason, ended or last
                left -= 1
                if left == 0:
                    return
        if not ended:
            outcome.wrong = f"{path}: a stream without its last event, after {text!r}"
        else:
            self._compare(outcome, text, reason, prompt, new)

    def _compare(self, outcome: Outcome, text: str, reason: str | None, prompt: Prompt, new: int) -> None:
        if reason not in ("stop", "length"):
            outcome.wrong = f"an answer without a reason for its end: {text!r}"
        elif outcome.kind != "sampled":
            wanted = self._reference.answer(prompt, new)
            outcome.compared = True
            if (text, reason) != wanted:
                # a server being stopped ends its answers early
                outcome.cut = self._excused(outcome) and reason == "length" and wanted[0].startswith(text)
                if not outcome.cut:
                    outcome.wrong = f"{prompt.text[-40:]!r}, {new} tokens: {(text, reason)} and not {wanted}"


def _message(answer: httpx.Response) -> str | None:
    """Returns the message of an error in OpenAI's form, or None if the answer has none."""
    try:
        found = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _whole_text(path: str, found: dict[str, Any]) -> tuple[str, str | None]:
    """Returns the text of a whole answer and its finish reason."""
    if path == RESPONSES:
        text = "".join(part["text"] for item in found["output"] for part in item["content"])
        return text, {"completed": "stop", "incomplete": "length"}.get(found["status"])
    choice = found["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"], choice["finish_reason"]


async def _pieces(path: str, answer: httpx.Response) -> AsyncIterator[tuple[str, str | None, bool]]:
    """Text, finish reason, and whether the stream ends, for each event."""
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            yield "", None, True
            continue
        found = json.loads(line[6:])
        if path == RESPONSES:
            kind = found["type"]
            piece = found["delta"] if kind == "response.output_text.delta" else ""
            why = {"response.completed": "stop", "response.incomplete": "length"}.get(kind)
            yield piece, why, why is not None
        elif found.get("choices"):
            choice = found["choices"][0]
            piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
            yield piece, choice.get("finish_reason"), False
