"""Material for prompts: invented words, names, filler sentences, and facts hidden among them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ..errors import EvaluationError
from .base import Source

# spare tokens, as sentences may have more tokens once joined
SLACK = 8

ONSETS = tuple("b br d dr f fl g gr k l m n p pl r s st t tr v z".split())
VOWELS = ("a", "e", "i", "o", "u", "ai", "oo", "ee")
ENDINGS = ("b", "ck", "d", "g", "l", "m", "n", "p", "r", "sh", "st", "t", "x")

NAMES = (
    "Maria", "Tomas", "Ingrid", "Pavel", "Leila", "Hassan", "Yuki", "Omar", "Greta", "Diego", "Anika", "Boris",
    "Celine", "Darius", "Elena", "Felix", "Gloria", "Henrik", "Irina", "Jonas", "Keiko", "Lorenzo", "Miriam", "Nadia",
    "Oscar", "Priya", "Quentin", "Rosa", "Stefan", "Tamara", "Ulrich", "Vera", "Walter", "Xenia", "Yusuf", "Zora",
)  # fmt: skip

CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Hanoi", "Riga", "Dublin", "Quito", "Tunis", "Kyoto", "Prague", "Bogota",
    "Perth", "Geneva", "Turin", "Seville", "Krakow", "Montreal", "Nairobi", "Havana",
)  # fmt: skip

SUBJECTS = (
    "The harbour", "A quiet street", "The old library", "The morning market", "A narrow bridge", "The railway station",
    "The village school", "A small bakery", "The river", "The northern road", "The town hall", "A row of poplars",
    "The ferry", "The botanical garden", "A travelling theatre", "The weather station", "The orchard", "The museum",
)  # fmt: skip
VERBS = (
    "was repaired in", "looks its best in", "has been busy since", "closes early in", "was painted again in",
    "draws visitors in", "stood empty in", "changed little in", "was photographed in", "smells of rain in",
)  # fmt: skip
TIMES = (
    "the spring", "late summer", "a cold winter", "the first week of May", "the year of the flood", "early autumn",
    "the holidays", "the dry season", "a single afternoon", "the months before the harvest",
)  # fmt: skip
ASIDES = (
    "Nobody in the town thought this unusual.", "People talked about it for a while and then forgot.",
    "The newspaper printed two lines about it.", "It cost less than everyone had feared.",
    "Children used to count the steps on the way.", "The council discussed it twice without a vote.",
    "Visitors often ask for the way there.", "A photograph of it hangs in the post office.",
    "It is mentioned in several letters of the time.", "The view from there is worth the walk.",
)  # fmt: skip

OBJECTS = (
    "a wooden spoon with holes", "a boat without a sail", "a song sung at harvest", "a blue stone found in rivers",
    "a hat worn by bakers", "a very small drum", "a door that opens upwards", "a soup made of chestnuts",
    "a lamp that burns oil", "a dance for three people", "a letter sent by hand", "a wheel with five spokes",
    "a coat made of wool", "a bird that cannot fly", "a knife used for bread", "a road covered with sand",
    "a cup made of glass", "a horse with white feet", "a bell rung at noon", "a field of yellow flowers",
    "a box for old coins", "a bridge made of rope", "a chair with two legs", "a window facing north",
)  # fmt: skip


def invented_word(rng: random.Random) -> str:
    """Draws a two-syllable word that is unlikely to be English."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2)) + rng.choice(ENDINGS)


def distinct(rng: random.Random, count: int) -> list[str]:
    """Draws `count` different invented words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[invented_word(rng)] = None
    return list(found)


def filler(rng: random.Random) -> Iterator[str]:
    """Yields endless sentences that are unrelated to the questions."""
    while True:
        sentence = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(TIMES)}."
        yield f"{sentence} {rng.choice(ASIDES)}" if rng.random() < 0.6 else sentence


def encode(tokenizer: object, text: str) -> tuple[int, ...]:
    """Returns token ids without special tokens, for text that follows other text."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def rng_for(source: Source, task: str, index: int) -> random.Random:
    """Makes the random generator for one document, independent of the order in which documents are made."""
    return random.Random(f"{source.seed}/{task}/{index}")


def hide_facts(source: Source, rng: random.Random, facts: Sequence[str], *, ordered: bool) -> tuple[int, ...]:
    """Returns token ids of about `source.length` tokens of filler with `facts` at random places.

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
