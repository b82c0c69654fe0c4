"""Tasks that give a prompt and ask about it: the prompt is in the cache, and compressed, before a question comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comparison import compare_logits
from ..session import Session
from .base import KL, RIGHT, TOP1, Document, Sums, Task


class AskingTask(Task):
    """Every question on a branch of the cache that holds the prompt.

    The expected answer is teacher-forced behind its question in one forward. It counts as right where every token of
    it is the likeliest one, which is when greedy decoding writes it. `right` counts the answers that the dense cache
    gets right; KL and top-1 agreement are over all positions of all answers.
    """

    metrics = (RIGHT, KL, TOP1)
    # whether a question sees the questions and answers before it
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
    """Logits of every token of each answer, [tokens, vocabulary]; questions and answers stay in the cache."""
    observed = []
    before: tuple[int, ...] = ()
    for question, answer in document.questions:
        observed.append(session.forward((*before, *question, *answer[:-1]), keep=len(answer)))
        before = answer[-1:]
    return observed
