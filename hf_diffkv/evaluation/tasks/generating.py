"""Tasks with generated answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..methods import HeldBytes
from ..session import Batch, Session
from .base import Document, Metric, Source, Sums, Task
from .prompts import encode, rng_for

SCORE = Metric("score", "score", True)
KEPT_OF_DENSE = Metric("kept", "kept of dense", True)
THINK, END_OF_THOUGHT = "<think>", "</think>"
# a character for private use, which no template changes
MARK = "\ue000"


@dataclass(frozen=True)
class ChatPrompt:
    """User message, in the model's chat template or as plain text if there is none.

    Attributes:
        question: text after the context, or the whole text.
        context: text that comes first and is compressed before the question is known.
        cue: end of a plain prompt, in place of the template's header of the answer.
        lead: beginning of the answer, which the model continues.
    """

    question: str
    context: str = ""
    cue: str = ""
    lead: str = ""

    def encode(self, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns token ids of the context, possibly empty, and of the question, without thinking."""
        chat = bool(getattr(tokenizer, "chat_template", None))
        text = f"{self.context}{MARK}{self.question}"
        if chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            if text.rstrip().endswith(THINK):
                text += f"\n{END_OF_THOUGHT}\n\n"
        else:
            text += self.cue
        before, _, after = text.partition(MARK)
        after += self.lead
        if not self.context:
            before, after = "", before + after
        first, *rest = (part for part in (before, after) if part)
        # a template already includes special tokens
        ids = encode(tokenizer, first) if chat else tuple(tokenizer(first).input_ids)
        return (ids, encode(tokenizer, rest[0])) if rest else ((), ids)


def spoken(text: str) -> str:
    """Removes a model's thinking from `text`; returns an empty text if thinking did not end."""
    _, end, answer = text.rpartition(END_OF_THOUGHT)
    if end:
        return answer.strip()
    return "" if text.lstrip().startswith(THINK) else text


class GeneratingTask(Task):
    """Task whose answers the model generates, with scores from 0 to 1 by `score_answer`.

    A prompt's context is cached and compressed before the question comes. `score` is the mean over documents. `kept` is
    the share of the dense cache's score, over the documents on which that score is above 0.
    """

    metrics = (SCORE, KEPT_OF_DENSE)
    batches = True
    max_new_tokens = 64

    @abstractmethod
    def score_answer(self, text: str, document: Document) -> float:
        """Scores an answer from 0 (wrong) to 1 (right), by `document.extra["expected"]`."""

    def document(self, source: Source, name: str, prompt: ChatPrompt, expected: Any) -> Document:
        """Makes the document that asks `prompt`.

        Args:
            source: settings of the document.
            name: name of the document.
            prompt: message of the user.
            expected: data for `score_answer`, ready for JSON.
        """
        context, question = prompt.encode(source.tokenizer)
        extra = {
            "expected": expected,
            "more_tokens": source.max_new_tokens or self.max_new_tokens,
            "seed": rng_for(source, f"{name}/sample", 0).randrange(2**31) if source.sample else None,
        }
        if not context:
            return Document(name, question, extra=extra)
        return Document(name, context, ((question, ()),), extra=extra)

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        ids = document.context
        if document.questions:
            session.forward(ids)
            ids = document.questions[0][0]
        with _options(document) as options:
            text = session.generate(ids, **options)
        return self._judge(text, document, reference, session.held(), session.seen)

    def measure_batch(
        self, batch: Batch, documents: Sequence[Document], references: Sequence[Any]
    ) -> list[tuple[Sums, Any, dict[str, Any]]]:
        prompts = [document.context for document in documents]
        if documents[0].questions:
            batch.forward(prompts)
            prompts = [document.questions[0][0] for document in documents]
        with _options(documents[0]) as options:
            texts = batch.generate(prompts, **options)
        return [self._judge(*found) for found in zip(texts, documents, references, batch.held(), batch.seen)]

    def _judge(
        self, text: str, document: Document, reference: Any, held: HeldBytes, seen: int
    ) -> tuple[Sums, Any, dict[str, Any]]:
        score = self.score_answer(spoken(text), document)
        known = score if reference is None else reference
        sums: Sums = {"score": (score, 1.0), "kept": (score if known > 0 else 0.0, known)}
        return sums, score, {"text": text, "held": held, "tokens": seen}


@contextmanager
def _options(document: Document) -> Iterator[dict[str, Any]]:
    """Yields arguments of `generate`, with a seed that is equal for every method and does not affect other draws."""
    extra = document.extra
    options = {"max_new_tokens": extra["more_tokens"]}
    if extra["seed"] is None:
        yield options
        return
    with torch.random.fork_rng():
        torch.manual_seed(extra["seed"])
        yield {**options, "do_sample": True}
