"""RULER's common words: which ten words of a numbered list are there more often than the others?"""

from __future__ import annotations

import random

from . import task
from .base import Source
from .chat import Prompt
from .ruler import RulerTask, english_words

COMMON = 10
# prompts of at least so many tokens: how often a common and another word is in the list
REPEATS = ((4096, 30, 3), (1024, 6, 1), (0, 3, 1))
EXAMPLE_REPEATS = (3, 1)
EXAMPLE_OTHERS = 5


def asked(rng: random.Random, others: int, often: int, seldom: int) -> tuple[Prompt, list[str]]:
    words = english_words(rng, COMMON + others)
    common = words[:COMMON]
    listed = common * often + words[COMMON:] * seldom
    rng.shuffle(listed)
    prompt = Prompt(
        context="A numbered list of words follows. Some words are in it more often than others; remember those.\n"
        + _numbered(listed),
        question=f"\nQuestion: Which {COMMON} words are in the list above most often?",
        cue="\n",
        lead=f"Answer: The {COMMON} words that are in the list most often are:",
    )
    return prompt, common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@task("ruler-common-words")
class CommonWords(RulerTask):
    """Ten words 30 times and the others 3 times, behind a short example with its answer.

    Prompts below 4,096 tokens repeat words less, as in RULER; below 1,024 still less, so that they fit.
    """

    max_new_tokens = 120

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[Prompt, list[str]]:
        often, seldom = next(repeats for least, *repeats in REPEATS if source.length >= least)
        example, common = asked(rng, EXAMPLE_OTHERS, *EXAMPLE_REPEATS)
        prompt, expected = asked(rng, size, often, seldom)
        shown = f"{example.context}{example.question}\n{example.lead} {_numbered(common)}\n\n"
        return Prompt(prompt.question, shown + prompt.context, prompt.cue, prompt.lead), expected
