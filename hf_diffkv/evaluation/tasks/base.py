"""What the runner asks of a task."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..session import Batch, Session

# of one document: metric -> (sum, weight); a figure over documents is the sum of sums over the sum of weights
Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Attributes:
        name: key in a record's metrics.
        title: of the column.
        higher_is_better: of the figure.
        transform: from the mean to the figure.
        digits: decimals, or None for a count `sum of weight`.
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
class Document:
    """One prompt with what is asked of it.

    Attributes:
        name: unique within the task.
        context: token ids of the prompt.
        questions: of a task that asks: token ids of each question and of its answer.
        continuation: of a task that continues: token ids that follow the prompt.
        extra: whatever else the task needs, ready for JSON.
    """

    name: str
    context: tuple[int, ...]
    questions: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    continuation: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The most tokens a cache sees of it."""
        longest = max((len(q) + len(a) for q, a in self.questions), default=0)
        return len(self.context) + max(longest, len(self.continuation)) + self.extra.get("more_tokens", 0)

    @property
    def digest(self) -> str:
        """Tells documents of one name apart whose content differs, for example by another tokenizer."""
        content = json.dumps([self.context, self.questions, self.continuation, self.extra], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Source:
    """What documents are made from.

    Attributes:
        tokenizer: of the model.
        count: how many documents.
        length: tokens of a prompt; None takes the task's own.
        seed: of everything drawn at random.
        limit: the most tokens the model takes; None where it does not say.
        max_new_tokens: of tasks that generate; None takes the task's own.
        sample: whether they draw tokens as the model's generation config says; the likeliest ones otherwise.
    """

    tokenizer: Any
    count: int
    length: int | None = None
    seed: int = 0
    limit: int | None = None
    max_new_tokens: int | None = None
    sample: bool = False


class Task(ABC):
    """Documents, and how a method does on one of them."""

    name: str = ""
    # names by which a command can take several tasks; "offline" ones take little time
    suites: tuple[str, ...] = ("offline",)
    # `measure_batch` measures several documents in one cache
    batches = False
    # how many documents and how many tokens of prompt where the user does not say
    count = 4
    length: int | None = 1600
    metrics: tuple[Metric, ...] = ()

    @abstractmethod
    def documents(self, source: Source) -> list[Document]:
        """`source.count` documents; the same ones for the same source. Raises `EvaluationError`."""

    @abstractmethod
    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        """Runs one document.

        Args:
            session: with an empty cache.
            reference: what `measure` observed of this document with the dense cache; None for the dense cache itself.

        Returns:
            The sums of the task's metrics, what later methods are compared with, and details for the record, among them
            "held"; where methods may end with different numbers of tokens, "tokens" says with how many.
        """

    def measure_batch(
        self, batch: Batch, documents: Sequence[Document], references: Sequence[Any]
    ) -> list[tuple[Sums, Any, dict[str, Any]]]:
        """Runs several documents in the empty cache of `batch`; for each what `measure` returns."""
        raise NotImplementedError
