"""RULER's needles in a haystack: values of keys, said once in a long text, and asked for."""

from __future__ import annotations

import functools
import random
import uuid
from dataclasses import dataclass

from . import task
from .base import Source
from .chat import Prompt
from .ruler import RulerTask, english_words, from_text, with_lines

NOISE = "The meadow is wide. The water is clear. The night is long. Off we walk. Out and home again."
NOISE_TEXT, REAL_TEXT, NEEDLES = "noise", "text", "needles"


@dataclass(frozen=True)
class Haystack:
    """One variant.

    Attributes:
        text: what the needles are hidden in: one line over and over, real text, or other needles.
        keys, values: what they are: "words", "numbers" or "uuids".
        num_keys, num_values, num_queries: keys hidden, values of each, keys asked for.
    """

    text: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


VARIANTS = {
    "single-1": Haystack(NOISE_TEXT),
    "single-2": Haystack(REAL_TEXT),
    "single-3": Haystack(REAL_TEXT, values="uuids"),
    "multikey-1": Haystack(REAL_TEXT, num_keys=4),
    "multikey-2": Haystack(NEEDLES),
    "multikey-3": Haystack(NEEDLES, keys="uuids", values="uuids"),
    "multivalue": Haystack(REAL_TEXT, num_values=4),
    "multiquery": Haystack(REAL_TEXT, num_keys=4, num_queries=4),
}


class Niah(RulerTask):
    """One variant of RULER's needle tasks."""

    max_new_tokens = 128

    def __init__(self, variant: Haystack) -> None:
        self.variant = variant

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[Prompt, list[str]]:
        variant = self.variant
        others = size if variant.text == NEEDLES else 0
        keys = _drawn(rng, variant.keys, variant.num_keys + others)
        values = _drawn(rng, variant.values, variant.num_keys * variant.num_values + others)
        kind = variant.values
        hidden = [
            (keys[index], values[index * variant.num_values : (index + 1) * variant.num_values])
            for index in range(variant.num_keys)
        ]
        needles = [_needle(kind, key, value) for key, found in hidden for value in found]
        rng.shuffle(needles)
        if variant.text == NEEDLES:
            lines = [_needle(kind, *pair) for pair in zip(keys[variant.num_keys :], values[len(needles) :])]
        else:
            lines = [NOISE] * size if variant.text == NOISE_TEXT else from_text(rng, size)
        joint = " " if variant.text == REAL_TEXT else "\n"
        asked = rng.sample(hidden, variant.num_queries)
        names = [key for key, _ in asked]
        query = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
        several = variant.num_queries * variant.num_values > 1
        things, verb = (f"magic {kind}", "are") if several else (f"magic {kind[:-1]}", "is")
        prompt = Prompt(
            context=f"Some text follows in which magic {kind} are hidden. Remember them: you will be asked later.\n"
            + joint.join(with_lines(rng, lines, needles)),
            question=f"\nAccording to the text, what {verb} the {things} of {query}?",
            cue="\n",
            lead=f"According to the text, the {things} of {query} {verb}",
        )
        return prompt, [value for _, found in asked for value in found]


def _needle(kind: str, key: str, value: str) -> str:
    return f"Among the magic {kind}, that of {key} is: {value}."


def _drawn(rng: random.Random, kind: str, number: int) -> list[str]:
    """`number` different keys or values."""
    if kind == "numbers":
        return [str(value) for value in rng.sample(range(10**6, 10**7), number)]
    if kind == "uuids":
        return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(number)]
    words = english_words(rng, 2 * number)
    return [f"{first}-{second}" for first, second in zip(words[::2], words[1::2])]


for name, variant in VARIANTS.items():
    task(f"ruler-niah-{name}")(functools.partial(Niah, variant))
