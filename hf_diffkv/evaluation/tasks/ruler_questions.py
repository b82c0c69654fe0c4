"""RULER's question answering: a question of SQuAD or HotpotQA, its documents among others."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ..scoring.overlap import found_strings
from . import task
from .base import Document, Source
from .chat import Prompt
from .hub import HubTask, Row
from .prompts import rng_for
from .ruler import longest

ORDER = "Answer the question by the documents. Write the answer alone, nothing else."


class QuestionTask(HubTask):
    """As many documents as fit, those of the question among them. Right is any of the answers that the set gives."""

    count = 20
    length = 4096
    max_new_tokens = 32
    split = "validation"

    @abstractmethod
    def texts_of(self, row: Row) -> list[str]:
        """The documents that a row comes with."""

    @abstractmethod
    def answers_of(self, row: Row) -> list[str]:
        """All that is right; empty where the question has no answer."""

    def documents(self, source: Source) -> list[Document]:
        rows = self.rows(source)
        rng = rng_for(source, self.name, 0)
        # all there is to fill a prompt up with
        pool = list(dict.fromkeys(text for row in rows for text in self.texts_of(row)))
        rng.shuffle(pool)
        answered = [index for index in range(len(rows)) if self.answers_of(rows[index])]
        chosen = rng.sample(answered, min(source.count, len(answered)))
        return [self._filled(source, index, rows[index], pool) for index in chosen]

    def _filled(self, source: Source, index: int, row: Row, pool: Sequence[str]) -> Document:
        rng = rng_for(source, f"{self.name}/row", index)
        needed = self.texts_of(row)
        others = [text for text in pool if text not in needed]
        rng.shuffle(others)
        seed = rng.random()

        def sized(size: int) -> Document:
            prompt, expected = self.prompt(row, random.Random(seed), others[: size - 1])
            return self.document(source, f"{self.name}-{index}", prompt, expected)

        return longest(sized, source.length, self.name, most=len(others) + 1)

    def prompt(self, row: Row, rng: random.Random, others: Sequence[str] = ()) -> tuple[Prompt, Any]:
        """What is asked, with the documents of `others` between those of the row."""
        texts = [*self.texts_of(row), *others]
        rng.shuffle(texts)
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, start=1))
        prompt = Prompt(
            context=f"{ORDER}\n\nThese are the documents.\n\n{listed}",
            question=f"\n\n{ORDER}\n\nQuestion: {row['question']}",
            cue="\n",
            lead="Answer:",
        )
        return prompt, self.answers_of(row)

    def score_answer(self, text: str, document: Document) -> float:
        return float(found_strings(text, document.extra["expected"]) > 0)


@task("ruler-qa-1")
class Squad(QuestionTask):
    """SQuAD 2.0."""

    repository = "rajpurkar/squad_v2"
    columns = ("context", "question", "answers")

    def texts_of(self, row: Row) -> list[str]:
        return [row["context"]]

    def answers_of(self, row: Row) -> list[str]:
        return list(dict.fromkeys(row["answers"]["text"]))


@task("ruler-qa-2")
class HotpotQa(QuestionTask):
    """HotpotQA, with its distractors."""

    repository = "hotpotqa/hotpot_qa"
    configs = ("distractor",)
    columns = ("context", "question", "answer")

    def texts_of(self, row: Row) -> list[str]:
        context = row["context"]
        return [f"{title}\n{''.join(lines)}" for title, lines in zip(context["title"], context["sentences"])]

    def answers_of(self, row: Row) -> list[str]:
        return [row["answer"]]
