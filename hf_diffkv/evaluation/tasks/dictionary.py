"""Invented words explained in a text of other things; what each means is asked afterwards."""

from __future__ import annotations

import random

from . import task
from .facts import FactsTask
from .words import OBJECTS, distinct

WORDS = 12


@task("dictionary")
class Dictionary(FactsTask):
    """Each word on a branch of its own."""

    count = 4

    def facts(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        words = distinct(rng, WORDS)
        meanings = rng.sample(OBJECTS, WORDS)
        asked = [(f"In the old dialect, {word} means", f"{meaning}.") for word, meaning in zip(words, meanings)]
        return [" ".join(parts) for parts in asked], asked
