"""RULER's variable tracking: a number, a variable that gets it, and others that get it one from another."""

from __future__ import annotations

import random
import string

from . import task
from .base import Source
from .chat import Prompt
from .ruler import RulerTask, with_lines
from .ruler_niah import NOISE

HOPS = 4
# lines of noise in the example that comes first
EXAMPLE_LINES = 4


def chain(rng: random.Random, letters: int) -> tuple[str, list[str], list[str]]:
    """The number, the names of `HOPS` + 1 variables, and the assignments."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    variables, value = list(names), str(rng.randrange(10_000, 100_000))
    values = [value, *(f"VAR {name}" for name in variables)]
    return value, variables, [f"VAR {name} = {source}" for name, source in zip(variables, values)]


def asked(rng: random.Random, letters: int, lines: int) -> tuple[Prompt, list[str]]:
    value, names, assignments = chain(rng, letters)
    text = "\n".join(with_lines(rng, [NOISE] * lines, assignments))
    prompt = Prompt(
        context=f"Follow the assignments of variables that are hidden in this text.\n\n{text}",
        question=f"\nQuestion: Which variables have the value {value} in the text above? List all of them.",
        cue="\n",
        lead=f"Answer: In the text above, {len(names)} variables have the value {value}, namely:",
    )
    return prompt, names


@task("ruler-variable-tracking")
class VariableTracking(RulerTask):
    """One chain of `HOPS` hops in noise, behind an example with its answer."""

    max_new_tokens = 30

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[Prompt, list[str]]:
        example, names = asked(rng, 3, EXAMPLE_LINES)
        prompt, expected = asked(rng, 5, size)
        shown = f"{example.context}{example.question}\n{example.lead} {' '.join(names)}\n\n"
        return Prompt(prompt.question, shown + prompt.context, prompt.cue, prompt.lead), expected
