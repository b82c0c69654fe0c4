"""The output of `/v1/responses` as it grows, and the events that report it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .generation import Step
from .parts import ReasoningText, ToolCall

Event = dict[str, Any]


class ResponseOutput:
    """Builds the items of a response from the steps of its answer.

    Args:
        request_id: id of the request, part of the items' ids.

    Attributes:
        items: complete items, in order.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.items: list[dict[str, Any]] = []
        # the message or reasoning under way
        self._open: dict[str, Any] | None = None
        # of tokens whose text was not sent yet
        self._logprobs: list[dict[str, Any]] = []

    def add(self, step: Step, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yields the events of a step. `logprobs` belong to its tokens."""
        self._logprobs += logprobs
        for piece in step.pieces:
            if isinstance(piece, ToolCall):
                yield from self.close()
                yield from self._call(piece)
            else:
                yield from self._text(piece)

    def end(self, complete: bool) -> Iterator[Event]:
        """Yields the events after the last step. `complete` says whether the model ended its answer."""
        if not self._open and not any(item["type"] in ("message", "function_call") for item in self.items):
            yield from self._begin("message")
        yield from self.close("completed" if complete else "incomplete")

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Yields the events that end the item under way, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        part, kind = item["content"][0], _kind(item)
        if kind == "output_text":
            part["logprobs"] += self._logprobs
            self._logprobs = []
        where = {**self._where(item), "content_index": 0}
        logprobs = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
        yield {"type": f"response.{kind}.done", **where, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **where, "part": part}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)

    def _text(self, piece: str) -> Iterator[Event]:
        wanted = "reasoning" if isinstance(piece, ReasoningText) else "message"
        if self._open is not None and self._open["type"] != wanted:
            yield from self.close()
        if self._open is None:
            yield from self._begin(wanted)
        part = self._open["content"][0]
        part["text"] += piece
        found, self._logprobs = self._logprobs, []
        logprobs = {}
        if wanted == "message":
            part["logprobs"] += found
            logprobs = {"logprobs": found}
        where = {**self._where(self._open), "content_index": 0}
        yield {"type": f"response.{_kind(self._open)}.delta", **where, "delta": str(piece), **logprobs}

    def _begin(self, kind: str) -> Iterator[Event]:
        head = {"type": kind, "status": "in_progress"}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._open = {**head, "id": self._id("msg"), "role": "assistant", "content": [part]}
        else:
            part = {"type": "reasoning_text", "text": ""}
            self._open = {**head, "id": self._id("rs"), "summary": [], "content": [part]}
        added = {**self._open, "content": []}
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": added}
        where = {**self._where(self._open), "content_index": 0}
        yield {"type": "response.content_part.added", **where, "part": dict(part)}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        ids = {"id": self._id("fc"), "call_id": self._id("call")}
        item = {"type": "function_call", **ids, "name": call.name, "arguments": "", "status": "in_progress"}
        where = self._where(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": dict(item)}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": call.arguments}
        done = {"name": call.name, "arguments": call.arguments}
        yield {"type": "response.function_call_arguments.done", **where, **done}
        item |= {"arguments": call.arguments, "status": "completed"}
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        # they belong to the text of the call
        self._logprobs = []

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self.items)}"

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items)}


def _kind(item: dict[str, Any]) -> str:
    return "output_text" if item["type"] == "message" else "reasoning_text"
