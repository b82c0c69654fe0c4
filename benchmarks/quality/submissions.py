"""Reads and checks what `hf-diffkv evaluate --submit` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.statistics import Estimate
from hf_diffkv.evaluation.submission import SUBMISSION_FORMAT, Submission, SubmissionEntry
from hf_diffkv.evaluation.tasks import get_task

Check = Callable[[Any], bool]
# of an environment; versions of other packages may stand beside them
NEEDED = ("python", "torch", "transformers", "device", "commit")


def read_submission(path: Path) -> Submission:
    """Reads a file that `write_submission` wrote.

    Raises:
        EvaluationError: the file is no such file. The message names the field.
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
    """`value`, an object of just these fields. Raises `ValueError` that names the field and its place."""
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
