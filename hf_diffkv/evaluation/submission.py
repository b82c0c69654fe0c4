"""Submissions: the figures of a run in one file, to be shown with those of others (benchmarks/quality/gallery.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import EvaluationError
from .records import Record
from .statistics import Estimate, estimate
from .tasks import get_task

SUBMISSION_FORMAT = 1


@dataclass(frozen=True)
class SubmissionEntry:
    """Figures of one method on one task.

    Attributes:
        documents: number of documents.
        digest: digest of the contents of all documents, equal for entries with the same documents.
        bytes, payload_bytes, dense_bytes: bytes as in `Record`, summed over documents; payload is None if unknown.
        simulated: whether bytes were computed instead of measured.
        metrics: estimates by name of the metric.
        environment: versions, hardware, commit.
    """

    method: str
    task: str
    documents: int
    digest: str
    bytes: int
    dense_bytes: int
    payload_bytes: int | None
    simulated: bool
    metrics: dict[str, Estimate]
    environment: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.bytes / self.dense_bytes


@dataclass(frozen=True)
class Submission:
    """Model and settings of a run, and an entry for each method and task."""

    model: str
    dtype: str
    seed: int
    sample: bool = False
    max_new_tokens: int | None = None
    entries: tuple[SubmissionEntry, ...] = field(default_factory=tuple)


def submission_of(records: Iterable[Record], settings: dict[str, Any]) -> Submission:
    """Makes the submission of a run, without methods that failed on a document of a task or whose bytes are unknown.

    Args:
        records: records of the run.
        settings: settings of the run's `RunFolder`.
    """
    by_key: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_key.setdefault((record.method, record.task), []).append(record)
    good = [group for group in by_key.values() if all(r.error is None and r.bytes and r.dense_bytes for r in group)]
    return Submission(**settings, entries=tuple(map(_entry, good)))


def _entry(records: list[Record]) -> SubmissionEntry:
    first = records[0]
    metrics = {}
    for metric in get_task(first.task).metrics:
        sums = [tuple(record.metrics[metric.name]) for record in records if metric.name in record.metrics]
        if sums and sum(weight for _, weight in sums):
            metrics[metric.name] = estimate(sums)
    payloads = [record.payload_bytes for record in records]
    digest = hashlib.sha256("".join(sorted(record.digest for record in records)).encode()).hexdigest()[:16]
    return SubmissionEntry(
        method=first.method,
        task=first.task,
        documents=len(records),
        digest=digest,
        bytes=sum(record.bytes or 0 for record in records),
        dense_bytes=sum(record.dense_bytes or 0 for record in records),
        payload_bytes=None if None in payloads else sum(payload or 0 for payload in payloads),
        simulated=any(record.simulated for record in records),
        metrics=metrics,
        environment=first.environment,
    )


def write_submission(submission: Submission, path: Path) -> None:
    """Writes a file. Raises `EvaluationError` if there is nothing to submit, or the file cannot be written."""
    if not submission.entries:
        raise EvaluationError("there is nothing to submit: no method ran without an error on all documents of a task.")
    try:
        content = {"format": SUBMISSION_FORMAT, **asdict(submission)}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror}.") from error
