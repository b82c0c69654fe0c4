"""Positions in a chat's tokens where messages end, for requests with a common beginning (beginnings.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# they begin differently, so at least one of them differs from the text it replaces
OTHERS = ("0", "A")


def chat_marks(
    render: Callable[[list[dict[str, Any]]], list[int]], messages: Sequence[dict[str, Any]], ids: list[int]
) -> tuple[int, ...]:
    """Returns the numbers of tokens before the text of the user's first message and of the last one.

    Args:
        render: function from messages to the token ids of the chat template.
        messages: messages of the chat.
        ids: token ids of `messages`.
    """
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    found = set()
    for index in {*users[:1], *users[-1:]}:
        # templates may refuse a chat without the message, so only the user's text is replaced
        rendered = [render([*messages[:index], {**messages[index], "content": other}]) for other in OTHERS]
        found.add(min(_common(ids, other) for other in rendered))
    return tuple(sorted(mark for mark in found if 0 < mark < len(ids)))


def _common(one: list[int], other: list[int]) -> int:
    """Returns the length of the common beginning."""
    pairs = zip(one, other)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
