"""Interface of a task for the runner."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..documents import Document
from ..session import Session

# sum and weight of one document by metric; a figure over documents is the sum of sums over the sum of weights
Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Metric:
    """A metric, shown as a column of the table.

    Attributes:
        name: key in a record's metrics.
        transform: function from the mean to the figure.
        digits: number of decimals; None shows a count, `sum of weight`.
    """

    name: str
    title: str
    higher_is_better: bool
    transform: Callable[[float], float] = float
    digits: int | None = 3


RIGHT = Metric("right", "right", True, digits=None)
KL = Metric("kl", "KL", False, digits=4)
TOP1 = Metric("top1", "top-1", True)
PERPLEXITY = Metric("nll", "perplexity", False, transform=math.exp, digits=2)


@dataclass(frozen=True)
class Source:
    """Settings from which documents are made.

    Attributes:
        length: number of tokens of a prompt; None uses the task's own.
        max_new_tokens: number of tokens that a task generates; None uses the task's own.
    """

    tokenizer: Any
    count: int
    length: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None


class Task(ABC):
    """A task: makes documents and measures a method on them."""

    name: str = ""
    # names of task groups for commands; tasks in "offline" take little time
    suites: tuple[str, ...] = ("offline",)
    # default number of documents, and of tokens per prompt
    count = 4
    length: int | None = 1600
    metrics: tuple[Metric, ...] = ()

    @abstractmethod
    def documents(self, source: Source) -> list[Document]:
        """Makes `source.count` documents, always the same ones for the same source. Raises `EvaluationError`."""

    @abstractmethod
    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        """Measures one document.

        Args:
            session: session with an empty cache.
            reference: observations on this document with the dense cache; None for the dense cache itself.

        Returns:
            Sums of the task's metrics; observations to compare later methods with; and details for the record,
            including the `HeldBytes` as "held".
        """
