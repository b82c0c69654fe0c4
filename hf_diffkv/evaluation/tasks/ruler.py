"""Synthetic tasks of RULER (Hsieh et al., 2024).

The tasks follow RULER's definitions, with this package's own wording, words and long texts. So figures compare methods
with each other, not with published figures. Unlike in RULER, the text is cached and compressed before the question
comes. A cache that sees the question while it compresses could keep only what the question needs, which is not possible
for users of a cached document.
"""

from __future__ import annotations

import functools
import math
import random
import re
import string
import uuid
from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import count, islice

from ..errors import EvaluationError
from . import task
from .base import Document, Source
from .generating import ChatPrompt, GeneratingTask
from .prompts import different, invented_word, rng_for
from .text import texts

# needles: line of noise, and kinds of text that hide them
NOISE = "The meadow is wide. The water is clear. The night is long. Off we walk. Out and home again."
NOISE_TEXT, REAL_TEXT, NEEDLES = "noise", "text", "needles"
# assignments from one variable to the next, and lines of noise in the preceding example
HOPS, EXAMPLE_LINES = 4, 4
# common words: their number, and by least tokens of a prompt how often common and other words are listed
COMMON, REPEATS = 10, ((4096, 30, 3), (1024, 6, 1), (0, 3, 1))
EXAMPLE_REPEATS, EXAMPLE_OTHERS = (3, 1), 5
# frequent words: number asked for, letters of a word, and tokens of a prompt per different word
ASKED, LETTERS, TOKENS_PER_WORD = 3, 6, 50
# exponent of their distribution and its normalisation; the most frequent entry is dots, not a word
ALPHA, ZETA, DOTS = 2.0, math.pi**2 / 6, "..."
# number of words from which the last one asked for is more frequent than the next one
FEWEST_TOLD_APART = 53


class RulerTask(GeneratingTask):
    """Task with the longest text that fits into `length` tokens, and a question about it.

    The score is the share of the expected strings that the answer contains, ignoring case.
    """

    suites = ("ruler",)
    count = 1
    length = 4096

    @abstractmethod
    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[ChatPrompt, list[str]]:
        """Makes the prompt with `size` pieces of text, 1 or more, and the expected strings."""

    def documents(self, source: Source) -> list[Document]:
        return [self._longest(source, index) for index in range(source.count)]

    def _longest(self, source: Source, index: int) -> Document:
        """Makes the document with the most pieces whose prompt has at most `source.length` tokens."""
        good, bad, found = 0, None, None
        while bad is None or bad - good > 1:
            size = (good + bad) // 2 if bad is not None else max(1, 2 * good)
            prompt, expected = self.prompt(source, rng_for(source, self.name, index), size)
            document = self.document(source, f"{self.name}-{index}", prompt, expected)
            if document.tokens - document.extra["more_tokens"] <= source.length:
                good, found = size, document
            else:
                bad = size
        if found is None:
            raise EvaluationError(f"task {self.name!r} does not fit into {source.length} tokens; raise --length.")
        return found

    def score_answer(self, text: str, document: Document) -> float:
        expected = document.extra["expected"]
        return sum(item.lower() in text.lower() for item in expected) / len(expected)


@functools.cache
def sentences() -> tuple[str, ...]:
    """Returns the sentences of real text, in order."""
    text = re.sub(r"\s+", " ", " ".join(texts()))
    return tuple(sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 20 <= len(sentence) <= 300)


@functools.cache
def _common_words() -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", " ".join(texts())))))


def english_words(rng: random.Random, number: int) -> list[str]:
    """Draws `number` different words of real text, with invented ones if there are too few."""
    known = _common_words()
    return different(lambda: invented_word(rng), number, rng.sample(known, min(number, len(known))))


def with_lines(rng: random.Random, lines: list[str], inserted: list[str]) -> list[str]:
    """Inserts the lines of `inserted` into `lines` at random places, in their order."""
    places = sorted(rng.randrange(len(lines) + 1) for _ in inserted)
    result, start = [], 0
    for place, line in zip(places, inserted):
        result += [*lines[start:place], line]
        start = place
    return result + lines[start:]


def from_text(rng: random.Random, number: int) -> list[str]:
    """Returns `number` consecutive sentences of real text from a random one on, wrapping around at the end."""
    known = sentences()
    start = rng.randrange(len(known))
    return list(islice((known[position % len(known)] for position in count(start)), number))


def behind_example(prompt: ChatPrompt, example: ChatPrompt, answer: str) -> ChatPrompt:
    """Puts an example with its answer in front of `prompt`."""
    shown = f"{example.context}{example.question}\n{example.lead} {answer}\n\n"
    return replace(prompt, context=shown + prompt.context)


@dataclass(frozen=True)
class Haystack:
    """Variant of the needle tasks.

    Attributes:
        text: kind of text that hides the needles: one repeated line, real text, or other needles.
        keys, values: kinds of keys and values: "words", "numbers" or "uuids".
        num_keys, num_values, num_queries: number of keys hidden, of values per key, and of keys asked for.
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
    """Variant of RULER's needle tasks."""

    max_new_tokens = 128

    def __init__(self, variant: Haystack) -> None:
        self.variant = variant

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[ChatPrompt, list[str]]:
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
        prompt = ChatPrompt(
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
    """Draws `number` different keys or values."""
    if kind == "numbers":
        return [str(value) for value in rng.sample(range(10**6, 10**7), number)]
    if kind == "uuids":
        return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(number)]
    words = english_words(rng, 2 * number)
    return [f"{first}-{second}" for first, second in zip(words[::2], words[1::2])]


for name, variant in VARIANTS.items():
    task(f"ruler-niah-{name}")(functools.partial(Niah, variant))


def assigned(rng: random.Random, letters: int, lines: int) -> tuple[ChatPrompt, list[str]]:
    """Makes a question about `HOPS` assignments in noise, and the variables that have the value in the end."""
    names = different(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), HOPS + 1)
    value = str(rng.randrange(10_000, 100_000))
    values = [value, *(f"VAR {name}" for name in names)]
    assignments = [f"VAR {name} = {source}" for name, source in zip(names, values)]
    text = "\n".join(with_lines(rng, [NOISE] * lines, assignments))
    prompt = ChatPrompt(
        context=f"Follow the assignments of variables that are hidden in this text.\n\n{text}",
        question=f"\nQuestion: Which variables have the value {value} in the text above? List all of them.",
        cue="\n",
        lead=f"Answer: In the text above, {len(names)} variables have the value {value}, namely:",
    )
    return prompt, names


@task("ruler-variable-tracking")
class VariableTracking(RulerTask):
    """Chain of `HOPS` hops in noise, after an example with its answer."""

    max_new_tokens = 30

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[ChatPrompt, list[str]]:
        example, names = assigned(rng, 3, EXAMPLE_LINES)
        prompt, expected = assigned(rng, 5, size)
        return behind_example(prompt, example, " ".join(names)), expected


def listed(rng: random.Random, others: int, often: int, seldom: int) -> tuple[ChatPrompt, list[str]]:
    words = english_words(rng, COMMON + others)
    common = words[:COMMON]
    drawn = common * often + words[COMMON:] * seldom
    rng.shuffle(drawn)
    prompt = ChatPrompt(
        context="A numbered list of words follows. Some words are in it more often than others; remember those.\n"
        + _numbered(drawn),
        question=f"\nQuestion: Which {COMMON} words are in the list above most often?",
        cue="\n",
        lead=f"Answer: The {COMMON} words that are in the list most often are:",
    )
    return prompt, common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@task("ruler-common-words")
class CommonWords(RulerTask):
    """List with ten words 30 times and the others 3 times, after a short example with its answer.

    Prompts below 4,096 tokens repeat words less often, as in RULER, and below 1,024 even less, so that they fit.
    """

    max_new_tokens = 120

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[ChatPrompt, list[str]]:
        often, seldom = next(repeats for least, *repeats in REPEATS if source.length >= least)
        example, common = listed(rng, EXAMPLE_OTHERS, *EXAMPLE_REPEATS)
        prompt, expected = listed(rng, size, often, seldom)
        return behind_example(prompt, example, _numbered(common)), expected


@task("ruler-frequent-words")
class FrequentWords(RulerTask):
    """Text in which the word of rank k has a frequency proportional to k to the power of -`ALPHA`."""

    max_new_tokens = 50

    def prompt(self, source: Source, rng: random.Random, size: int) -> tuple[ChatPrompt, list[str]]:
        number = max(ASKED + 1, source.length // TOKENS_PER_WORD)
        coded = different(lambda: "".join(rng.choices(string.ascii_lowercase, k=LETTERS)), number)
        words = [DOTS, *coded]
        total = size + FEWEST_TOLD_APART
        drawn = [word for rank, word in enumerate(words, start=1) for _ in range(int(total * rank**-ALPHA / ZETA))]
        rng.shuffle(drawn)
        prompt = ChatPrompt(
            context="A text of coded words follows. Watch how often each of them is in it. " + " ".join(drawn),
            question=f"\nQuestion: Leave the dots '{DOTS}' aside. Which three coded words are in the text above most "
            "often? Do not explain.",
            cue="\n",
            lead="Answer: The three coded words that are in the text above most often are:",
        )
        return prompt, words[1 : ASKED + 1]
