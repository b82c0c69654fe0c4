"""Problems whose answers are formulas: MATH (Hendrycks et al., 2021), 500 of it (Lightman et al., 2023), AIME 2024."""

from __future__ import annotations

import random
from typing import Any

from ..errors import EvaluationError
from ..scoring.answers import boxed
from ..scoring.latex import final_latex, same_answer
from . import task
from .base import Document
from .chat import Prompt
from .hub import HubTask, Row


class FormulaTask(HubTask):
    """Right is a final answer that means the same as the expected one."""

    columns = ("problem", "answer")
    max_new_tokens = 2048
    stop = ("\nProblem:",)
    thinks = True

    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        order = r"Reason step by step and put the final answer into \boxed{}."
        return Prompt(f"Problem: {row['problem']}\n{order}", cue="\nSolution:"), self.answer(row)

    def answer(self, row: Row) -> str:
        """The expected answer."""
        return str(row["answer"])

    def score_answer(self, text: str, document: Document) -> float:
        found = final_latex(text)
        return float(found is not None and same_answer(found, document.extra["expected"]))


@task("math")
class Math(FormulaTask):
    """The test split of MATH, all seven subjects."""

    repository = "EleutherAI/hendrycks_math"
    configs = (
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    )
    columns = ("problem", "solution")

    def answer(self, row: Row) -> str:
        found = boxed(row["solution"])
        if found is None:
            raise EvaluationError(f"task {self.name!r}: a solution has no boxed answer: {row['solution'][-60:]!r}.")
        return found


@task("math-500")
class Math500(FormulaTask):
    """500 problems of MATH."""

    repository = "HuggingFaceH4/MATH-500"


@task("aime24")
class Aime24(FormulaTask):
    """The 30 problems of AIME 2024; answers are numbers from 0 to 999."""

    repository = "HuggingFaceH4/aime_2024"
    split = "train"
    max_new_tokens = 8192
