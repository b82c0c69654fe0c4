"""A value that is changed several times in the text: the last one counts."""

from __future__ import annotations

import random

from . import task
from .facts import FactsTask
from .words import NAMES

PEOPLE = 6
CHANGES = 3
CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Hanoi", "Riga", "Dublin", "Quito", "Tunis", "Kyoto", "Prague", "Bogota",
    "Perth", "Geneva", "Turin", "Seville", "Krakow", "Montreal", "Nairobi", "Havana",
)  # fmt: skip


@task("updates")
class Updates(FactsTask):
    """`By now Maria lives in Oslo.`, later `By now Maria lives in Lima.`: where does she live at the end?"""

    ordered = True

    def facts(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        names = rng.sample(NAMES, PEOPLE)
        moves = {name: rng.sample(CITIES, CHANGES) for name in names}
        order = [name for name in names for _ in range(CHANGES)]
        rng.shuffle(order)
        left = {name: list(cities) for name, cities in moves.items()}
        facts = [f"By now {name} lives in {left[name].pop(0)}." for name in order]
        return facts, [(f"By now {name} lives in", f"{moves[name][-1]}.") for name in names]
