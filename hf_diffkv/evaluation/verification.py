"""Verifies a configuration for a model by comparing its predictions with the dense cache's."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comparison import compare_logits
from .methods import Method
from .methods.base import using_attention
from .methods.dense import DenseMethod
from .session import Session
from .tasks import Document

# tokens run one by one, as in generation, before the rest run at once
DECODED = 16
# KL in nats that rounding in half precision causes in most models
ROUNDING = 1e-3
# a lossless cache rounds in more places than eager attention does
ROUNDING_FACTOR = 3


@dataclass(frozen=True)
class Outcome:
    """Result of one method over all documents.

    Attributes:
        kl: mean KL(dense || method) of the next token, in nats.
        top1: share of positions with the same most likely token.
        bytes, dense_bytes: memory of the caches after the prompts.
    """

    name: str
    kl: float
    top1: float
    bytes: int
    dense_bytes: int

    @property
    def ratio(self) -> float:
        return self.bytes / self.dense_bytes


class EagerMethod(DenseMethod):
    """Dense cache with eager attention, whose divergence from another attention is caused by rounding alone."""

    def attached(self, model: Any, cache: Any) -> AbstractContextManager[None]:
        return using_attention(model, "eager")


def measure(
    model: Any,
    name: str,
    method: Method,
    documents: Iterable[Document],
    expected: Iterable[tuple[Tensor, int]],
) -> Outcome:
    """Measures `method` on all documents, teacher-forced.

    Args:
        expected: results of `follow` with the dense cache, one per document.
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
    """Returns a method's logits after the prompt, [positions, vocabulary], and its bytes after the prompt."""
    session = Session(model, method)
    session.forward(document.context)
    held = session.held().bytes
    ids = document.continuation[:-1]
    logits = [session.forward([token]) for token in ids[:DECODED]]
    rest = ids[DECODED:]
    if rest:
        logits.append(session.forward(rest, keep=len(rest)))
    return torch.cat(logits), held
