"""Finds reasoning and tool calls in a text as it arrives, and treats what only looks like a call as text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from .parts import ToolCall, build_response_parser, response_events_to_chunks

_logger = logging.getLogger("hf_diffkv")


def drop_invalid_template(tokenizer: Any, model: Any) -> None:
    """Removes the tokenizer's `response_template` if no parser can be built from it, and warns."""
    try:
        build_response_parser(tokenizer, model, [])
    # a template is data from the model's author
    except Exception as error:
        _logger.warning("the tokenizer's response_template is invalid and ignored: %s", error)
        tokenizer.response_template = None


class Markup:
    """Turns a text into pieces: a `str` of the answer, a `ReasoningText`, or a `ToolCall`.

    Args:
        parser: parser of the answer.
        again: function that returns a parser for the text after an invalid call.
        hidden: strings that are removed from such a call because they are not text.
        calls: whether tools may be called; if not, every call is invalid.
    """

    def __init__(self, parser: Any, again: Callable[[], Any], hidden: Sequence[str] = (), calls: bool = True) -> None:
        self._parser, self._again, self._hidden, self._calls = parser, again, hidden, calls
        # text fed after the last part that was returned or is not text
        self._unsaid = ""

    def begin(self) -> list[Any]:
        """Returns the pieces that are known before any text."""
        return self._pieces(lambda: self._parser.initial_events, "")

    def feed(self, text: str) -> list[Any]:
        """Returns the pieces that become known with more text."""
        return self._pieces(lambda: self._parser.feed(text), text)

    def end(self) -> list[Any]:
        """Returns the last pieces, at the end of the text."""
        return self._pieces(lambda: self._parser.finalize()[1], "")

    def _pieces(self, events: Callable[[], list[dict[str, Any]]], text: str) -> list[Any]:
        self._unsaid += text
        pieces: list[Any] = []
        try:
            found = events()
            for event, following in zip(found, [*found[1:], None]):
                pieces += self._pieces_of(event)
                self._note(event, following)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            _logger.warning("an answer does not match its template: %s", error)
            written, self._unsaid, self._parser = self._unsaid, "", self._again()
            for string in self._hidden:
                written = written.replace(string, "")
            pieces += [written] if written else []
        return pieces

    def _note(self, event: dict[str, Any], following: dict[str, Any] | None) -> None:
        if event["type"] == "region_chunk" and not event["dirty"]:
            # anything else there marked the beginning of reasoning
            starts = self._unsaid.startswith(event["text"])
            self._unsaid = self._unsaid[len(event["text"]) :] if starts else ""
        elif event["type"] == "region_close" and (following is None or following["type"] != "region_open"):
            self._unsaid = ""

    def _pieces_of(self, event: dict[str, Any]) -> list[Any]:
        """Returns the pieces of an event. Raises various errors if a call is malformed or not allowed."""
        pieces = response_events_to_chunks([event])
        for piece in pieces:
            if isinstance(piece, ToolCall) and not self._calls:
                raise ValueError("a tool is called, but none may be")
            if isinstance(piece, ToolCall) and not isinstance(piece.name, str):
                raise TypeError(f"the name of a call is {piece.name!r}")
        return pieces
