"""Tasks whose answers are generated and then read: the prompt, then `generate()` on the cache that holds it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ..session import Session
from .base import Document, Metric, Sums, Task

SCORE = Metric("score", "score", True)
KEPT = Metric("kept", "kept of dense", True)


class GeneratingTask(Task):
    """The answer is whatever the model writes; `score_answer` says how good it is, from 0 to 1.

    `score` is the mean over documents; `kept` is the same over those documents that the dense cache gets right.
    """

    metrics = (SCORE, KEPT)
    max_new_tokens = 64
    # generation ends where the text holds one of these
    stop: tuple[str, ...] = ()

    @abstractmethod
    def score_answer(self, text: str, document: Document) -> float:
        """From 0 (wrong) to 1 (right)."""

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        text = session.generate(document.context, self.max_new_tokens, self.stop)
        for stop in self.stop:
            text = text.split(stop)[0]
        score = self.score_answer(text, document)
        known = score if reference is None else reference
        sums: Sums = {"score": (score, 1.0), "kept": (score if known > 0 else 0.0, float(known > 0))}
        return sums, score, {"text": text, "held": session.held()}
