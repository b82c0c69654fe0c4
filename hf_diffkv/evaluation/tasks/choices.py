"""Questions with answers to choose from: MMLU, MMLU-Pro and GPQA, with a chain of thought."""

from __future__ import annotations

import random
import string
from abc import abstractmethod
from typing import Any

from ..scoring.answers import final_choice
from . import task
from .base import Document
from .chat import Prompt
from .hub import HubTask, Row


class ChoiceTask(HubTask):
    """Right is an answer that ends with the right letter."""

    max_new_tokens = 1024
    stop = ("\nQuestion:",)
    thinks = True

    @abstractmethod
    def choices(self, row: Row, rng: random.Random) -> tuple[str, list[str], int]:
        """The question, what may be chosen, and which of it is right."""

    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        question, choices, right = self.choices(row, rng)
        letters = string.ascii_uppercase[: len(choices)]
        listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip(letters, choices))
        order = 'Think step by step and end with "The answer is (X)", X being the letter of the right choice.'
        text = f"Question: {question.strip()}\n{listed}\n{order}"
        return Prompt(text, cue="\nAnswer:"), {"right": letters[right], "letters": letters}

    def score_answer(self, text: str, document: Document) -> float:
        expected = document.extra["expected"]
        return float(final_choice(text, expected["letters"]) == expected["right"])


@task("mmlu")
class Mmlu(ChoiceTask):
    """MMLU (Hendrycks et al., 2021), all subjects."""

    repository = "cais/mmlu"
    configs = ("all",)
    columns = ("question", "choices", "answer")

    def choices(self, row: Row, rng: random.Random) -> tuple[str, list[str], int]:
        return row["question"], list(row["choices"]), int(row["answer"])


@task("mmlu-pro")
class MmluPro(ChoiceTask):
    """MMLU-Pro (Wang et al., 2024): up to ten choices."""

    repository = "TIGER-Lab/MMLU-Pro"
    columns = ("question", "options", "answer_index")
    max_new_tokens = 2048

    def choices(self, row: Row, rng: random.Random) -> tuple[str, list[str], int]:
        return row["question"], list(row["options"]), int(row["answer_index"])


@task("gpqa")
class Gpqa(ChoiceTask):
    """The diamond subset of GPQA (Rein et al., 2024), its choices in random order; the set is gated."""

    repository = "Idavidrein/gpqa"
    configs = ("gpqa_diamond",)
    split = "train"
    columns = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    max_new_tokens = 4096

    def choices(self, row: Row, rng: random.Random) -> tuple[str, list[str], int]:
        question, *answers = (row[column].strip() for column in self.columns)
        order = rng.sample(range(len(answers)), len(answers))
        return question, [answers[index] for index in order], order.index(0)
