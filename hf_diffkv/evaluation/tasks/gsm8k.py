"""GSM8K (Cobbe et al., 2021): sums in words."""

from __future__ import annotations

import random
from typing import Any

from ..scoring.answers import final_number
from . import task
from .base import Document
from .chat import Prompt
from .hub import HubTask, Row


@task("gsm8k")
class Gsm8k(HubTask):
    """Right is an answer whose final number is the expected one."""

    repository = "openai/gsm8k"
    configs = ("main",)
    columns = ("question", "answer")
    max_new_tokens = 1024
    stop = ("\nQuestion:",)
    thinks = True

    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        order = 'Reason step by step and end with "The answer is" and the number.'
        # the reasoning that comes with the set ends in `#### 42`
        expected = row["answer"].rpartition("####")[2].strip()
        return Prompt(f"Question: {row['question']}\n{order}", cue="\nAnswer:"), expected

    def score_answer(self, text: str, document: Document) -> float:
        found = final_number(text)
        return float(found is not None and found == final_number(document.extra["expected"]))
