"""Several questions in turn on one cache, with other talk in between: what later turns still find in the prompt."""

from __future__ import annotations

import dataclasses
from itertools import islice

from . import task
from .base import Document, Source
from .dictionary import Dictionary
from .prompts import encode, rng_for
from .words import filler

TALK = 4


@task("turns")
class Turns(Dictionary):
    """The questions of `dictionary` one after another, each behind `TALK` sentences of filler."""

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
