"""Ends of messages in the tokens of a chat."""

from __future__ import annotations

from typing import Any

import pytest
from hf_diffkv_serving.server.marks import chat_marks


def render(messages: list[dict[str, Any]]) -> list[int]:
    """A template of characters, which wants a user behind a system message and begins an answer."""
    if messages[0]["role"] == "system" and len(messages) == 1:
        raise ValueError("a conversation needs a user")
    text = "".join(f"<{message['role'][0]}>{message['content'].strip()}</>" for message in messages)
    return [ord(letter) for letter in text + "<a>"]


def said(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@pytest.mark.parametrize("content", ["What?", "0 is it", "A", "000", " A0"])
def test_before_what_the_user_says_first_and_last(content: str) -> None:
    messages = said(content, "Nothing.", content, system="Be brief.")
    ids = render(messages)
    first, last = chat_marks(render, messages, ids)
    text = "".join(map(chr, ids))
    assert text[:first] == "<s>Be brief.</><u>"
    assert text[:last] == f"<s>Be brief.</><u>{content.strip()}</><a>Nothing.</><u>"


def test_chats_without_turns() -> None:
    assert chat_marks(render, said("What?", system="Be brief."), render(said("What?", system="Be brief."))) == (18,)
    assert chat_marks(render, said("What?"), render(said("What?"))) == (3,)
    assert chat_marks(render, [{"role": "tool", "content": "5"}], render([{"role": "tool", "content": "5"}])) == ()
    # a template that says nothing of it
    assert chat_marks(lambda messages: [1], said("What?"), [1]) == ()
