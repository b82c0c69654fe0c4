"""RULER's synthetic tasks (Hsieh et al., 2024): what they share.

The tasks are made anew after RULER's definitions; the wording, the words and the long texts are this package's own, so
that figures compare methods with each other and not with a published list. Unlike in RULER the text is in the cache,
and compressed, before the question comes: a cache that sees the question while it compresses can keep just what the
question needs, which users of a cached document cannot have.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from itertools import count, islice

from ..errors import EvaluationError
from .base import Document, Source
from .chat import Prompt
from .generating import GeneratingTask
from .prompts import rng_for
from .text import texts
from .words import invented_word


class RulerTask(GeneratingTask):
    """As long a text as fits into `length` tokens, and a question about it.

    The score is the share of the expected strings that the answer holds, whatever the case.
    """

    suites = ("ruler",)
    count = 1
    length = 4096

    @abstractmethod
    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[Prompt, list[str]]:
        """What is asked with `size` pieces of text, 1 or more, and the expected strings."""

    def documents(self, source: Source) -> list[Document]:
        return [self._document(source, index) for index in range(source.count)]

    def _document(self, source: Source, index: int) -> Document:
        def sized(size: int) -> Document:
            prompt, expected = self.prompt(source, rng_for(source, self.name, index), size)
            return self.document(source, f"{self.name}-{index}", prompt, expected)

        return longest(sized, source.length, self.name)

    def score_answer(self, text: str, document: Document) -> float:
        expected = document.extra["expected"]
        return sum(item.lower() in text.lower() for item in expected) / len(expected)


def longest(sized: Callable[[int], Document], length: int, name: str) -> Document:
    """The longest document whose prompt takes up to `length` tokens.

    Args:
        sized: the document of a size, from 1 on; it grows with its size.
        name: of the task, for the error.

    Raises:
        EvaluationError: the smallest one does not fit.
    """

    def fits(document: Document) -> bool:
        return document.tokens - document.extra["more_tokens"] <= length

    good, bad, found = 0, None, None
    while bad is None or bad - good > 1:
        size = (good + bad) // 2 if bad is not None else max(1, 2 * good)
        document = sized(size)
        if fits(document):
            good, found = size, document
        else:
            bad = size
    if found is None:
        raise EvaluationError(f"task {name!r} does not fit into {length} tokens; raise --length.")
    return found


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of real text, in order."""
    text = re.sub(r"\s+", " ", " ".join(texts()))
    return tuple(sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 20 <= len(sentence) <= 300)


@cache
def _common_words() -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", " ".join(texts())))))


def english_words(rng: random.Random, number: int) -> list[str]:
    """`number` different words; once those of real text are used up, invented ones."""
    known = _common_words()
    found = dict.fromkeys(rng.sample(known, min(number, len(known))))
    while len(found) < number:
        found[invented_word(rng)] = None
    return list(found)


def with_lines(rng: random.Random, lines: list[str], inserted: list[str]) -> list[str]:
    """`lines` with those of `inserted`, in their order, at random places."""
    places = sorted(rng.randrange(len(lines) + 1) for _ in inserted)
    result, start = [], 0
    for place, line in zip(places, inserted):
        result += [*lines[start:place], line]
        start = place
    return result + lines[start:]


def from_text(rng: random.Random, number: int) -> list[str]:
    """`number` sentences of real text in a row, from a random one on; the text begins again where it ends."""
    known = sentences()
    start = rng.randrange(len(known))
    return list(islice((known[position % len(known)] for position in count(start)), number))
