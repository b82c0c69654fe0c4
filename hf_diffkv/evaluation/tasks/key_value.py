"""Codes of people, said once in a text of other things, and asked for afterwards."""

from __future__ import annotations

from . import task
from .asking import AskingTask
from .base import Document, Source
from .prompts import encode, hide_facts, rng_for
from .words import NAMES

PAIRS = 12


@task("key-value")
class KeyValue(AskingTask):
    """`The code for Maria is 4821.`"""

    count = 2

    def documents(self, source: Source) -> list[Document]:
        return [self._document(source, index) for index in range(source.count)]

    def _document(self, source: Source, index: int) -> Document:
        rng = rng_for(source, "key-value", index)
        names = rng.sample(NAMES, PAIRS)
        codes = rng.sample(range(1000, 10000), PAIRS)
        facts = [f"The code for {name} is {code}." for name, code in zip(names, codes)]
        questions = tuple(
            (encode(source.tokenizer, f"\n\nThe code for {name} is"), encode(source.tokenizer, f" {code}."))
            for name, code in zip(names, codes)
        )
        return Document(f"key-value-{index}", hide_facts(source, rng, facts, source.length), questions)
