"""Tasks that hide facts in filler text and ask for them afterwards."""

from __future__ import annotations

import random
from abc import abstractmethod

from .asking import AskingTask
from .base import Document, Source
from .prompts import encode, hide_facts, rng_for


class FactsTask(AskingTask):
    """Every fact is said once; a question begins as the fact did, and the answer is how it went on."""

    count = 2
    # whether the text says the facts in their order
    ordered = False

    @abstractmethod
    def facts(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        """The facts, and questions with their answers."""

    def documents(self, source: Source) -> list[Document]:
        return [self.document(source, index) for index in range(source.count)]

    def document(self, source: Source, index: int) -> Document:
        """One of them."""
        rng = rng_for(source, self.name, index)
        facts, asked = self.facts(rng)
        context = hide_facts(source, rng, facts, ordered=self.ordered)
        questions = tuple(
            (encode(source.tokenizer, f"\n\n{question}"), encode(source.tokenizer, f" {answer}"))
            for question, answer in asked
        )
        return Document(f"{self.name}-{index}", context, questions)
