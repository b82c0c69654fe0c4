"""Codes of people, said once in a text of other things, and asked for afterwards."""

from __future__ import annotations

import random

from . import task
from .facts import FactsTask
from .words import NAMES

PAIRS = 12


@task("key-value")
class KeyValue(FactsTask):
    """`The code for Maria is 4821.`"""

    def facts(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        names = rng.sample(NAMES, PAIRS)
        codes = rng.sample(range(1000, 10000), PAIRS)
        asked = [(f"The code for {name} is", f"{code}.") for name, code in zip(names, codes)]
        return [" ".join(parts) for parts in asked], asked
