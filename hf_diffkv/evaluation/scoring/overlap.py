"""How much of an expected text an answer has."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

PUNCTUATION = str.maketrans("", "", string.punctuation)


def found_strings(text: str, expected: Sequence[str]) -> float:
    """The share of `expected` that `text` holds, whatever the case (RULER's rule)."""
    return sum(item.lower() in text.lower() for item in expected) / len(expected)


def normalised_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles (SQuAD's rule)."""
    words = text.lower().translate(PUNCTUATION).split()
    return [word for word in words if word not in ("a", "an", "the")]


def f1(text: str, expected: str) -> float:
    """Harmonic mean of precision and recall of words, in any order."""
    mine, theirs = normalised_words(text), normalised_words(expected)
    return _f1((Counter(mine) & Counter(theirs)).total(), len(mine), len(theirs))


def rouge_l(text: str, expected: str) -> float:
    """The same of the longest common subsequence of words (ROUGE-L with beta 1, no stemming)."""
    mine, theirs = (re.findall(r"[a-z0-9]+", part.lower()) for part in (text, expected))
    before = [0] * (len(theirs) + 1)
    for word in mine:
        row = [0]
        for column, other in enumerate(theirs, start=1):
            row.append(before[column - 1] + 1 if word == other else max(before[column], row[-1]))
        before = row
    return _f1(before[-1], len(mine), len(theirs))


def similarity(text: str, expected: str) -> float:
    """The share of characters that match, both texts together."""
    return SequenceMatcher(None, text, expected, autojunk=False).ratio()


def _f1(common: int, mine: int, theirs: int) -> float:
    return 2 * common / (mine + theirs) if common else 0.0
