"""Tasks whose answers are generated and then read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..methods import HeldBytes
from ..session import Batch, Session
from .base import Document, Metric, Source, Sums, Task
from .chat import ChatPrompt, spoken
from .prompts import rng_for

SCORE = Metric("score", "score", True)
KEPT_OF_DENSE = Metric("kept", "kept of dense", True)


class GeneratingTask(Task):
    """The answer is whatever the model writes; `score_answer` says how good it is, from 0 to 1.

    Where a prompt has a context it is in the cache, and compressed, before the question comes. `score` is the mean over
    documents; `kept` is what it is of the dense cache's, over those documents for which that one scores at all.
    """

    metrics = (SCORE, KEPT_OF_DENSE)
    batches = True
    max_new_tokens = 64

    @abstractmethod
    def score_answer(self, text: str, document: Document) -> float:
        """From 0 (wrong) to 1 (right); `document.extra["expected"]` says what is right."""

    def document(self, source: Source, name: str, prompt: ChatPrompt, expected: Any) -> Document:
        """The document that asks `prompt`.

        Args:
            expected: what `score_answer` needs to know, ready for JSON.
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
    """Arguments of `generate`; every method draws the same random numbers, and nobody else's are changed."""
    extra = document.extra
    options = {"max_new_tokens": extra["more_tokens"]}
    if extra["seed"] is None:
        yield options
        return
    with torch.random.fork_rng():
        torch.manual_seed(extra["seed"])
        yield {**options, "do_sample": True}
