"""Submissions: the results of a run in one file, to be shown alongside others; `peers.py --submit` writes them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.records import Record
from hf_diffkv.evaluation.statistics import Estimate, estimate
from hf_diffkv.evaluation.tasks import get_task

SUBMISSION_FORMAT = 1
Check = Callable[[Any], bool]
# of an environment; other packages' versions may be listed as well
NEEDED = ("python", "torch", "transformers", "device", "commit")


@dataclass(frozen=True)
class SubmissionEntry:
    """Results of one method on one task.

    Attributes:
        documents: number of documents.
        digest: digest of all documents' contents, equal for entries with the same documents.
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
    """Makes the submission of a run, without methods that failed on any document of a task or whose bytes are unknown.

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


def read_submission(path: Path) -> Submission:
    """Reads a file written by `write_submission`.

    Raises:
        EvaluationError: the file is not valid. The message names the field.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _submission(content)
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        said = "it is no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else str(error)
        raise EvaluationError(f"{path} is no record of an evaluation: {said}.") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


TEXT: tuple[Check, str] = (lambda value: isinstance(value, str) and bool(value.strip()), "a text")
COUNT: tuple[Check, str] = (_is_count, "an integer of at least 1")
FLAG: tuple[Check, str] = (lambda value: isinstance(value, bool), "true or false")
NUMBER: tuple[Check, str] = (lambda value: type(value) in (int, float) and math.isfinite(value), "a number")
COUNT_OR_NULL: tuple[Check, str] = (lambda value: value is None or _is_count(value), "null or an integer of at least 1")
OBJECT: tuple[Check, str] = (lambda value: isinstance(value, dict), "an object")
RUN = {
    "format": (lambda value: value == SUBMISSION_FORMAT, f"{SUBMISSION_FORMAT}, the format that this version reads"),
    "model": TEXT,
    "dtype": TEXT,
    "seed": (lambda value: _is_count(value) or value == 0, "an integer of at least 0"),
    "sample": FLAG,
    "max_new_tokens": COUNT_OR_NULL,
    "entries": (lambda value: isinstance(value, list) and bool(value), "a list of one entry at least"),
}
ENTRY = {
    **{"method": TEXT, "task": TEXT, "documents": COUNT, "digest": TEXT, "bytes": COUNT, "dense_bytes": COUNT},
    **{"payload_bytes": COUNT_OR_NULL, "simulated": FLAG, "metrics": OBJECT, "environment": OBJECT},
}
FIGURE = {each.name: NUMBER for each in fields(Estimate)}


def _checked(value: Any, known: dict[str, tuple[Check, str]], place: str = "") -> dict[str, Any]:
    """Returns `value`, an object with exactly these fields. Raises `ValueError` that names the field and its place."""
    if not isinstance(value, dict):
        raise ValueError(f"{place.rstrip('.') or 'it'} must be an object")
    for name in [*known, *value]:
        if name not in value:
            raise ValueError(f"{place}{name} is missing")
        if name not in known:
            raise ValueError(f"{place}{name} is no field")
        check, wanted = known[name]
        if not check(value[name]):
            raise ValueError(f"{place}{name}={value[name]!r} must be {wanted}")
    return value


def _submission(content: Any) -> Submission:
    run = dict(_checked(content, RUN))
    del run["format"]
    entries = tuple(_read_entry(value, f"entries[{index}].") for index, value in enumerate(run.pop("entries")))
    keys = [(entry.method, entry.task) for entry in entries]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise ValueError(f"entries[{index}].method={key[0]!r} was there before with task {key[1]!r}")
    return Submission(**run, entries=entries)


def _read_entry(value: Any, place: str) -> SubmissionEntry:
    entry = dict(_checked(value, ENTRY, place))
    try:
        known = {metric.name for metric in get_task(entry["task"]).metrics}
    except EvaluationError as error:
        raise ValueError(f"{place}task={entry['task']!r} is no task of this version") from error
    metrics = {}
    for name, figure in entry["metrics"].items():
        at = f"{place}metrics.{name}"
        if name not in known:
            raise ValueError(f"{at} is no metric of the task {entry['task']!r}")
        found = metrics[name] = Estimate(**_checked(figure, FIGURE, f"{at}."))
        if found.weight <= 0:
            raise ValueError(f"{at}.weight={found.weight!r} must be above 0")
        if found.low > found.high:
            raise ValueError(f"{at}.low={found.low!r} must not be above high={found.high!r}")
    for name in NEEDED:
        if name not in entry["environment"]:
            raise ValueError(f"{place}environment.{name} is missing")
    return SubmissionEntry(**{**entry, "metrics": metrics})
