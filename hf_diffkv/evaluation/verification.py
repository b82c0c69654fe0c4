"""Whether a configuration is right and good enough for a model: its predictions against the dense cache's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comparison import compare_logits
from .methods import Method
from .session import Session
from .tasks import Document

# tokens that come one by one, as generation runs them, before the rest comes at once
DECODED = 16
# KL in nats that rounding in half precision alone brings about
ROUNDING = 1e-3


@dataclass(frozen=True)
class Outcome:
    """One method on all documents.

    Attributes:
        kl: mean KL(dense || method) of the next token, nats.
        top1: share of positions at which both find the same token likeliest.
        bytes, dense_bytes: what the caches held of the prompts.
    """

    name: str
    kl: float
    top1: float
    bytes: int
    dense_bytes: int

    @property
    def ratio(self) -> float:
        """bytes / dense_bytes"""
        return self.bytes / self.dense_bytes


def measure(
    model: Any,
    name: str,
    method: Method,
    documents: Iterable[Document],
    expected: Iterable[tuple[Tensor, int]],
) -> Outcome:
    """Runs `method` on all documents, teacher-forced.

    Args:
        expected: what `follow` gave for the dense cache, document by document.
    """
    kl = top1 = count = 0.0
    held = whole = 0
    for document, (reference, dense_bytes) in zip(documents, expected):
        logits, size = follow(model, method, document)
        sums = compare_logits(logits, reference, document.continuation[1:])
        kl, top1, count = kl + sums["kl"][0], top1 + sums["top1"][0], count + sums["kl"][1]
        held, whole = held + size, whole + dense_bytes
    return Outcome(name, kl / count, top1 / count, held, whole)


def follow(model: Any, method: Method, document: Document) -> tuple[Tensor, int]:
    """The logits that a method gives behind the prompt, [positions, vocabulary], and its bytes after the prompt."""
    session = Session(model, method)
    session.forward(document.context)
    held = session.held().bytes
    ids = document.continuation[:-1]
    logits = [session.forward([token]) for token in ids[:DECODED]]
    rest = ids[DECODED:]
    if rest:
        logits.append(session.forward(rest, keep=len(rest)))
    return torch.cat(logits), held
