"""A value that is changed several times in the text: the last one counts."""

from __future__ import annotations

from . import task
from .asking import AskingTask
from .base import Document, Source
from .prompts import encode, hide_facts, rng_for
from .words import NAMES

PEOPLE = 6
CHANGES = 3
CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Hanoi", "Riga", "Dublin", "Quito", "Tunis", "Kyoto", "Prague", "Bogota",
    "Perth", "Geneva", "Turin", "Seville", "Krakow", "Montreal", "Nairobi", "Havana",
)  # fmt: skip


@task("updates")
class Updates(AskingTask):
    """`By now Maria lives in Oslo.`, later `By now Maria lives in Lima.`: where does she live at the end?"""

    count = 2

    def documents(self, source: Source) -> list[Document]:
        return [self._document(source, index) for index in range(source.count)]

    def _document(self, source: Source, index: int) -> Document:
        rng = rng_for(source, "updates", index)
        names = rng.sample(NAMES, PEOPLE)
        moves = {name: rng.sample(CITIES, CHANGES) for name in names}
        order = [name for name in names for _ in range(CHANGES)]
        rng.shuffle(order)
        left = {name: list(cities) for name, cities in moves.items()}
        facts = [f"By now {name} lives in {left[name].pop(0)}." for name in order]
        context = hide_facts(source, rng, facts, source.length, ordered=True)
        questions = tuple(
            (encode(source.tokenizer, f"\n\nBy now {name} lives in"), encode(source.tokenizer, f" {moves[name][-1]}."))
            for name in names
        )
        return Document(f"updates-{index}", context, questions)
