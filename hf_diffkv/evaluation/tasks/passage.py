"""Copying a passage of the prompt word for word: every token of it must still be there."""

from __future__ import annotations

import random

from . import task
from .asking import AskingTask
from .base import Document, Source
from .prompts import encode, hide_facts, rng_for
from .words import NAMES, OBJECTS, distinct

PASSAGES = 4


def passage(rng: random.Random) -> tuple[str, str]:
    """How a passage begins, and the rest of it."""
    first, second, place = distinct(rng, 3)
    one, two = rng.sample(NAMES, 2)
    thing, other = rng.sample(OBJECTS, 2)
    start = f"In the notes of {one} about {first.capitalize()}:"
    rest = (
        f" {two} carried {thing} from {place.capitalize()} to the {second} gate, counted {rng.randrange(11, 99)} "
        f"steps, and left {other} behind."
    )
    return start, rest


@task("passage")
class Passage(AskingTask):
    """A passage is right when all of its forty-odd tokens are."""

    count = 2

    def documents(self, source: Source) -> list[Document]:
        return [self._document(source, index) for index in range(source.count)]

    def _document(self, source: Source, index: int) -> Document:
        rng = rng_for(source, "passage", index)
        passages = [passage(rng) for _ in range(PASSAGES)]
        context = hide_facts(source, rng, [start + rest for start, rest in passages], source.length)
        questions = tuple(
            (encode(source.tokenizer, f"\n\nOnce more, word for word. {start}"), encode(source.tokenizer, rest))
            for start, rest in passages
        )
        return Document(f"passage-{index}", context, questions)
