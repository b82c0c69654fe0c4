"""Turns the input of `/v1/responses`, which may contain earlier output, into chat messages."""

from __future__ import annotations

from typing import Any

from .fields import refusal

# fields of items: those that become a message, and those that describe an earlier output
MESSAGE = {"role", "content", "reasoning_content"}
MADE = {"type", "id", "status"}
ITEMS = {
    "message": {*MESSAGE, "phase"},
    "reasoning": {"content", "summary", "encrypted_content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
}


def messages_of(value: Any) -> Any:
    """Returns a text, its parts, or items as a list of messages that is not yet validated.

    Raises:
        PydanticCustomError: the input contains something that this server does not accept.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise refusal("it must be a string, or a list of items that is not empty")
    if all("role" not in item and item.get("type") == "input_text" for item in value):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    # reasoning of the answer that follows
    thoughts: str | None = None
    for i, item in enumerate(value):
        kind = _checked_kind(item, i)
        if kind == "reasoning":
            thoughts = _thoughts(item, i)
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        else:
            messages.append({name: item[name] for name in MESSAGE if name in item})
        if thoughts is not None and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", thoughts)
            thoughts = None
    return messages


def _checked_kind(item: dict[str, Any], place: int) -> str:
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in ITEMS:
        raise refusal(f"item {place} has type {kind!r}; this server takes {', '.join(ITEMS)}")
    # clients pass back all fields that their library knows, including empty ones
    unknown = {name for name, value in item.items() if value is not None} - ITEMS[kind] - MADE
    if unknown:
        raise refusal(f"item {place} has {min(unknown)!r}, which is unknown; leave it out")
    if kind == "message" and not isinstance(item.get("role"), str):
        raise refusal(f"item {place} has no role")
    return kind


def _thoughts(item: dict[str, Any], place: int) -> str:
    content = item.get("content") or []
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise refusal(f"item {place} has content that is not a list of texts")
    return "".join(texts)
