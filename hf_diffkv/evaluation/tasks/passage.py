"""Copying a passage of the prompt word for word: every token of it must still be there."""

from __future__ import annotations

import random

from . import task
from .facts import FactsTask
from .words import NAMES, OBJECTS, distinct

PASSAGES = 4


def passage(rng: random.Random) -> tuple[str, str]:
    """How a passage begins, and the rest of it."""
    first, second, place = distinct(rng, 3)
    one, two = rng.sample(NAMES, 2)
    thing, other = rng.sample(OBJECTS, 2)
    start = f"In the notes of {one} about {first.capitalize()}:"
    rest = (
        f"{two} carried {thing} from {place.capitalize()} to the {second} gate, counted {rng.randrange(11, 99)} "
        f"steps, and left {other} behind."
    )
    return start, rest


@task("passage")
class Passage(FactsTask):
    """A passage is right when all of its forty-odd tokens are."""

    def facts(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        passages = [passage(rng) for _ in range(PASSAGES)]
        asked = [(f"Once more, word for word. {start}", rest) for start, rest in passages]
        return [f"{start} {rest}" for start, rest in passages], asked
