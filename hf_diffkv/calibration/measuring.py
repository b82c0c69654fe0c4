"""Measures thresholds on given documents: bytes of real caches, and loss relative to the dense cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.environment import describe_environment
from ..evaluation.errors import EvaluationError
from ..evaluation.methods import get_method
from ..evaluation.methods.dense import DENSE
from ..evaluation.records import Record, RunFolder
from ..evaluation.runner import run
from ..evaluation.statistics import estimate
from ..evaluation.tasks import Document, Task
from ..evaluation.tasks.base import KL
from .thresholds import Candidate, Thresholds


@dataclass
class Bench:
    """A model and documents on which thresholds are measured. Existing records in `folder` are reused.

    Args:
        base: method whose thresholds vary.
        task: task whose first metric is the calibration criterion.
    """

    model: Any
    base: str
    task: Task
    documents: list[Document]
    folder: RunFolder
    retry: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        self.metric = self.task.metrics[0]
        self.environment = describe_environment(self.model.device)

    @property
    def loss_name(self) -> str:
        """Name of the loss in JSON."""
        return KL.name if self.metric is KL else f"{self.metric.name}_loss"

    @property
    def title(self) -> str:
        """Title of the loss in a table."""
        return KL.title if self.metric is KL else f"loss of {self.task.name} ({self.metric.title})"

    def measure(self, thresholds: Sequence[Thresholds]) -> list[Candidate]:
        """Measures a candidate for each of `thresholds`. Raises `EvaluationError` if the dense cache fails."""
        labels = [each.method(self.base) for each in thresholds]
        methods = [get_method(label) for label in (DENSE, *labels)]
        tasks = [(self.task, self.documents)]
        run(self.model, methods, tasks, self.folder, retry=self.retry, quiet=self.quiet)
        wanted = {(document.name, document.digest) for document in self.documents}
        found: dict[str, list[Record]] = {}
        for record in self.folder.records():
            if record.task == self.task.name and (record.document, record.digest) in wanted:
                found.setdefault(record.method, []).append(record)
        dense = found[DENSE]
        failed = _error(dense)
        if failed is not None:
            raise EvaluationError(f"the dense cache failed: {failed}")
        if math.isnan(self._figure(dense)):
            raise EvaluationError(
                f"the dense cache gets nothing right in task {self.task.name!r}, so nothing can be lost; choose "
                "another task, or --text and --max-kl."
            )
        return [self._candidate(pair, found[label], dense) for pair, label in zip(thresholds, labels)]

    def _candidate(self, thresholds: Thresholds, records: list[Record], dense: list[Record]) -> Candidate:
        error = _error(records)
        if error is not None:
            return Candidate(thresholds, error=error)
        held, whole = sum(record.bytes for record in records), sum(record.dense_bytes for record in records)
        worse = self._figure(dense) - self._figure(records)
        return Candidate(thresholds, held, held / whole, worse if self.metric.higher_is_better else -worse)

    def _figure(self, records: list[Record]) -> float:
        mean = estimate([record.metrics[self.metric.name] for record in records]).mean
        return self.metric.transform(mean)


def _error(records: list[Record]) -> str | None:
    return next((record.error for record in records if record.error is not None), None)
