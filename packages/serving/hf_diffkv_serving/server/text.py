"""Decodes tokens as they arrive: characters of several tokens, stop strings, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from .markup import Markup

# what decoders insert for bytes that form no character
NO_CHARACTER = "\ufffd"
# lengths tried for the tokens before a stream; the first that decodes to text is used
SEED_TOKENS = (1, 4, 16)


class StopStrings:
    """Ends a text before the first stop string that is complete.

    Attributes:
        found: whether there was one; no text follows then.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Returns new text that is certain by now. The rest may be the beginning of a stop string."""
        self._held += text
        # end and start of each: the one that is complete first counts, or the longest of several
        places = ((self._held.find(string), string) for string in self._strings)
        ends = [(start + len(string), start) for start, string in places if start >= 0]
        if ends:
            self.found = True
            said, self._held = self._held[: min(ends)[1]], ""
            return said
        longest = min(len(self._held), max(map(len, self._strings), default=1) - 1)
        kept = next((size for size in range(longest, 0, -1) if self._begins(self._held[-size:])), 0)
        said, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return said

    def flush(self) -> str:
        """Returns the rest at the end of the text."""
        said, self._held = self._held, ""
        return said

    def _begins(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)


class Transcript:
    """Text of one answer, in pieces as they become known.

    A piece is a `str` of the answer, a `ReasoningText`, or a `ToolCall`.

    Args:
        tokenizer: fast tokenizer of the model.
        markup: parser of reasoning and tool calls, for which the text keeps special tokens; None for plain text.
        stops: strings that end the answer and are left out of it.
        before: tokens that the answer continues, so that a leading space is kept; empty if it stands alone.
    """

    def __init__(
        self, tokenizer: Any, markup: Markup | None = None, stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._markup = tokenizer, markup
        self._stream = self._new_stream(before)
        # tokens whose text is not known yet, and number of characters before them
        self._pending: list[int] = []
        self._decoded = 0
        self._stops = StopStrings(stops)

    def begin(self) -> list[Any]:
        """Returns the pieces that are known before the first token."""
        return [] if self._markup is None else self._markup.begin()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. No tokens may be added after it."""
        return self._stops.found

    @property
    def decoded(self) -> int:
        """Number of complete characters in all tokens so far."""
        return self._decoded

    def add(self, token: int) -> list[Any]:
        """Returns the pieces that become known with one more token."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        except Exception:
            # bytes that form no character, after one that was returned; tokenizers has no narrower error
            text = self._decode(self._pending)
            self._stream = self._new_stream(self._pending)
        if text:
            self._pending = []
        self._decoded += len(text)
        return self._pieces(self._stops.feed(text))

    def end(self) -> list[Any]:
        """Returns the last pieces, at the end of the answer."""
        if self.stopped:
            pieces = []
        else:
            # the stream holds back what may begin a character
            pieces = self._pieces(self._stops.feed(self._decode(self._pending)))
            pieces += self._pieces(self._stops.flush())
        if self._markup is not None:
            pieces += self._markup.end()
        return pieces

    def _new_stream(self, before: Sequence[int]) -> DecodeStream:
        """Returns a stream that continues the last few `before` tokens that form whole characters."""
        parts = (list(before[-size:]) for size in SEED_TOKENS if len(before))
        seed = next((part for part in parts if (text := self._decode(part)) and NO_CHARACTER not in text), [])
        return DecodeStream(seed, skip_special_tokens=self._markup is None)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._markup is None)

    def _pieces(self, text: str) -> list[Any]:
        if not text:
            return []
        return [text] if self._markup is None else self._markup.feed(text)


def joined(pieces: Iterable[Any], kind: type) -> str:
    """The text of all pieces of one kind, `str` or `ReasoningText`."""
    return "".join(piece for piece in pieces if type(piece) is kind)
