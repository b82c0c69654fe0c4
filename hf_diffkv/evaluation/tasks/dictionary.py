"""Invented words explained in a text of other things; what each means is asked afterwards."""

from __future__ import annotations

from . import task
from .asking import AskingTask
from .base import Document, Source
from .prompts import encode, hide_facts, rng_for
from .words import OBJECTS, distinct

WORDS = 12


def definitions(source: Source, name: str, index: int) -> Document:
    """A document of `WORDS` definitions."""
    rng = rng_for(source, name, index)
    words = distinct(rng, WORDS)
    meanings = rng.sample(OBJECTS, WORDS)
    facts = [f"In the old dialect, {word} means {meaning}." for word, meaning in zip(words, meanings)]
    context = hide_facts(source, rng, facts, source.length)
    questions = tuple(
        (
            encode(source.tokenizer, f"\n\nIn the old dialect, {word} means"),
            encode(source.tokenizer, f" {meaning}."),
        )
        for word, meaning in zip(words, meanings)
    )
    return Document(f"dictionary-{index}", context, questions)


@task("dictionary")
class Dictionary(AskingTask):
    """Each word on a branch of its own."""

    def documents(self, source: Source) -> list[Document]:
        return [definitions(source, "dictionary", index) for index in range(source.count)]
