"""Tasks that hide facts in filler text and ask for them once the prompt is cached and compressed."""

from __future__ import annotations

import dataclasses
import random
from abc import abstractmethod
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..comparison import compare_logits
from ..session import Session
from . import task
from .base import KL, RIGHT, TOP1, Document, Source, Sums, Task
from .prompts import CITIES, NAMES, OBJECTS, distinct, encode, filler, hide_facts, rng_for

# facts per text of each task; changes per value, and filler sentences before a question
PAIRS, WORDS, PASSAGES, PEOPLE = 12, 12, 4, 6
CHANGES, TALK = 3, 4
# facts, and questions with their answers
AskedFacts = tuple[list[str], list[tuple[str, str]]]


class AskingTask(Task):
    """Task that asks each question on a branch of the cache that holds the prompt.

    The expected answer is teacher-forced after its question in one forward. It counts as right if each of its tokens is
    the most likely one, meaning that greedy decoding would generate it. `right` counts only answers that the dense
    cache gets right. KL and top-1 agreement are over all positions of all answers.
    """

    metrics = (RIGHT, KL, TOP1)
    # whether a question sees earlier questions and answers
    in_turn = False

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        session.forward(document.context)
        held = session.held()
        if self.in_turn:
            observed = _answer_in_turn(session, document)
        else:
            texts = [(*question, *answer[:-1]) for question, answer in document.questions]
            asked = session.branch().ask(texts)
            observed = [logits[-len(answer) :] for logits, (_, answer) in zip(asked, document.questions)]
        answers = [answer for _, answer in document.questions]
        right = [
            bool((logits.argmax(-1).cpu() == torch.tensor(answer)).all()) for logits, answer in zip(observed, answers)
        ]
        logits = torch.cat(observed)
        dense = logits if reference is None else reference["logits"]
        known = right if reference is None else reference["right"]
        sums = compare_logits(logits, dense, [token for answer in answers for token in answer])
        sums["right"] = (float(sum(a and b for a, b in zip(right, known))), float(sum(known)))
        return sums, {"logits": logits, "right": right}, {"answers": right, "held": held}


def _answer_in_turn(session: Session, document: Document) -> list[Tensor]:
    """Returns the logits of each answer's tokens, [tokens, vocabulary]; questions and answers stay in the cache."""
    observed = []
    before: tuple[int, ...] = ()
    for question, answer in document.questions:
        observed.append(session.forward((*before, *question, *answer[:-1]), keep=len(answer)))
        before = answer[-1:]
    return observed


class FactsTask(AskingTask):
    """Task with facts stated once; a question repeats the beginning of a fact, and its answer is the rest."""

    count = 2
    # whether the text states the facts in order
    ordered = False

    @abstractmethod
    def facts(self, rng: random.Random) -> AskedFacts:
        """Draws facts, and questions with their answers."""

    def documents(self, source: Source) -> list[Document]:
        return [self.document(source, index) for index in range(source.count)]

    def document(self, source: Source, index: int) -> Document:
        """Makes one document."""
        rng = rng_for(source, self.name, index)
        facts, asked = self.facts(rng)
        context = hide_facts(source, rng, facts, ordered=self.ordered)
        questions = tuple(
            (encode(source.tokenizer, f"\n\n{question}"), encode(source.tokenizer, f" {answer}"))
            for question, answer in asked
        )
        return Document(f"{self.name}-{index}", context, questions)


@task("key-value")
class KeyValue(FactsTask):
    """Codes of people: `The code for Maria is 4821.`"""

    def facts(self, rng: random.Random) -> AskedFacts:
        names = rng.sample(NAMES, PAIRS)
        codes = rng.sample(range(1000, 10000), PAIRS)
        asked = [(f"The code for {name} is", f"{code}.") for name, code in zip(names, codes)]
        return [" ".join(parts) for parts in asked], asked


@task("dictionary")
class Dictionary(FactsTask):
    """Meanings of invented words."""

    count = 4

    def facts(self, rng: random.Random) -> AskedFacts:
        words = distinct(rng, WORDS)
        meanings = rng.sample(OBJECTS, WORDS)
        asked = [(f"In the old dialect, {word} means", f"{meaning}.") for word, meaning in zip(words, meanings)]
        return [" ".join(parts) for parts in asked], asked


def passage(rng: random.Random) -> tuple[str, str]:
    """Draws the beginning and the rest of a passage."""
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
    """Passages to repeat word for word; one is right only if all of its forty-odd tokens are."""

    def facts(self, rng: random.Random) -> AskedFacts:
        passages = [passage(rng) for _ in range(PASSAGES)]
        asked = [(f"Once more, word for word. {start}", rest) for start, rest in passages]
        return [f"{start} {rest}" for start, rest in passages], asked


class AskedAtTheEnd(FactsTask):
    """Task that asks for one fact at the end of the prompt, the case for which token-dropping methods are made."""

    suites = ()
    count = 24

    def document(self, source: Source, index: int) -> Document:
        document = super().document(source, index)
        question, answer = document.questions[index % len(document.questions)]
        # the last token is run after the prompt, as its logits predict the answer
        context, asked = (*document.context, *question[:-1]), (question[-1:], answer)
        return dataclasses.replace(document, context=context, questions=(asked,))


@task("key-value-asked")
class KeyValueAsked(AskedAtTheEnd, KeyValue):
    """One code, asked for at the end of the prompt."""

    count = 12


@task("city-asked")
class CityAsked(AskedAtTheEnd):
    """`Maria lives in Oslo.` on a separate line, with a one-word answer."""

    def facts(self, rng: random.Random) -> AskedFacts:
        asked = [
            (f"{name} lives in", f"{city}.") for name, city in zip(rng.sample(NAMES, PAIRS), rng.sample(CITIES, PAIRS))
        ]
        return [f"\n\n{' '.join(parts)}\n\n" for parts in asked], asked


@task("dictionary-asked")
class DictionaryAsked(AskedAtTheEnd, Dictionary):
    """Meaning of an invented word, with an answer of four or five words."""


@task("passage-asked")
class PassageAsked(AskedAtTheEnd, Passage):
    """One passage word for word, asked for at the end of the prompt."""

    count = 12


@task("updates")
class Updates(FactsTask):
    """Values that change: `By now Maria lives in Oslo.`, later `By now Maria lives in Lima.`; asks for the last."""

    ordered = True

    def facts(self, rng: random.Random) -> AskedFacts:
        names = rng.sample(NAMES, PEOPLE)
        moves = {name: rng.sample(CITIES, CHANGES) for name in names}
        order = [name for name in names for _ in range(CHANGES)]
        rng.shuffle(order)
        left = {name: list(cities) for name, cities in moves.items()}
        facts = [f"By now {name} lives in {left[name].pop(0)}." for name in order]
        return facts, [(f"By now {name} lives in", f"{moves[name][-1]}.") for name in names]


@task("turns")
class Turns(Dictionary):
    """Questions of `dictionary` one after another on one cache, each after `TALK` sentences of filler."""

    count = 2
    in_turn = True

    def document(self, source: Source, index: int) -> Document:
        document = super().document(source, index)
        sentences = filler(rng_for(source, "turns-talk", index))
        questions = tuple(
            ((*encode(source.tokenizer, "\n\n" + " ".join(islice(sentences, TALK))), *question), answer)
            for question, answer in document.questions
        )
        total = sum(len(question) + len(answer) for question, answer in questions)
        longest = max(len(question) + len(answer) for question, answer in questions)
        return dataclasses.replace(document, questions=questions, extra={"more_tokens": total - longest})
