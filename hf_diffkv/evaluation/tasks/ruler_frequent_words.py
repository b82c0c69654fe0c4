"""RULER's frequent words: which three of many invented words, drawn by a zeta distribution, are there most often?"""

from __future__ import annotations

import math
import random
import string

from . import task
from .base import Source
from .chat import Prompt
from .ruler import RulerTask

ASKED = 3
LETTERS = 6
# exponent of the distribution and the sum it is divided by
ALPHA, ZETA = 2.0, math.pi**2 / 6
# the most frequent word is none
NOISE = "..."
# from so many words on, the last of those asked for is there more often than the next one
LEAST = 53
# tokens of prompt for each different word
TOKENS_PER_WORD = 50


def coded_words(rng: random.Random, number: int) -> list[str]:
    """`number` different strings of letters."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(found)


@task("ruler-frequent-words")
class FrequentWords(RulerTask):
    """The word of rank k is there in proportion to k to the power of minus `ALPHA`."""

    max_new_tokens = 50

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[Prompt, list[str]]:
        words = [NOISE, *coded_words(rng, max(ASKED + 1, source.length // TOKENS_PER_WORD))]
        total = size + LEAST
        drawn = [word for rank, word in enumerate(words, start=1) for _ in range(int(total * rank**-ALPHA / ZETA))]
        rng.shuffle(drawn)
        prompt = Prompt(
            context="A text of coded words follows. Watch how often each of them is in it. " + " ".join(drawn),
            question=f"\nQuestion: Leave the dots '{NOISE}' aside. Which three coded words are in the text above most "
            "often? Do not explain.",
            cue="\n",
            lead="Answer: The three coded words that are in the text above most often are:",
        )
        return prompt, words[1 : ASKED + 1]
