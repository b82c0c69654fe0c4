"""Prompts that hide facts in filler text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..errors import EvaluationError
from .base import Source
from .words import filler

# tokens left for what the tokenizer makes of joined sentences
SLACK = 8


def encode(tokenizer: object, text: str) -> tuple[int, ...]:
    """Token ids without special tokens, for text that follows other text."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def rng_for(source: Source, task: str, index: int) -> random.Random:
    """A generator for one document, the same wherever and in whatever order documents are made."""
    return random.Random(f"{source.seed}/{task}/{index}")


def hide_facts(source: Source, rng: random.Random, facts: Sequence[str], *, ordered: bool) -> tuple[int, ...]:
    """Token ids of about `source.length` tokens of filler with `facts` at random places; special tokens as of a prompt.

    Args:
        ordered: whether the facts keep their order.

    Raises:
        EvaluationError: the facts alone are longer.
    """
    tokenizer, length = source.tokenizer, source.length
    room = length - SLACK - sum(len(encode(tokenizer, " " + fact)) for fact in ("", *facts))
    if room < 0:
        raise EvaluationError(f"a prompt of {length} tokens is too short for {len(facts)} facts; raise --length.")
    sentences: list[str] = []
    for sentence in filler(rng):
        room -= len(encode(tokenizer, " " + sentence))
        if room < 0:
            break
        sentences.append(sentence)
    places = [rng.randrange(len(sentences) + 1) for _ in facts]
    placed = list(zip(sorted(places) if ordered else places, facts))
    text: list[str] = []
    for index in range(len(sentences) + 1):
        text += [fact for place, fact in placed if place == index]
        text += sentences[index : index + 1]
    return tuple(tokenizer(" ".join(text)).input_ids)
