"""Results of a run: a folder with its settings and a JSON line for each method, task and document."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..replacing import save_text
from .errors import EvaluationError

RUN_NAME = "run.json"
RECORDS_NAME = "records.jsonl"
# subfolder of a run's folder, with a run folder for each environment that its methods need
ENVIRONMENTS_NAME = "environments"


@dataclass(frozen=True)
class Record:
    """Result of one method on one document.

    Attributes:
        method, task, document: names.
        digest: digest of the document's content.
        metrics: sum and weight by metric.
        bytes, payload_bytes: memory of the cache with the document in it.
        dense_bytes: memory of the dense cache with the document in it.
        simulated: whether `bytes` was computed rather than measured.
        seconds: time for the whole document.
        error: reason for which the method failed and has no figures.
        details: further results of the task, such as which answers were right.
        environment: versions, commit, hardware.
        basis: further settings that determined the figures (`basis.bases_of`); empty in records of 0.1.
    """

    method: str
    task: str
    document: str
    digest: str
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    bytes: int | None = None
    payload_bytes: int | None = None
    dense_bytes: int | None = None
    simulated: bool = False
    seconds: float = 0.0
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    basis: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.method, self.task, self.document, self.digest


class RunFolder:
    """Folder of a run. Opening an existing folder continues its run.

    Args:
        folder: path of the folder, which is created if missing.
        settings: settings that make figures comparable (model, dtype, seed); must equal those of a continued run.

    Raises:
        EvaluationError: the folder is not writable, or holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.path, self.settings = folder, folder / RECORDS_NAME, settings
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._check_settings(settings)
            drop_incomplete_line(self.path)
        except OSError as error:
            raise EvaluationError(f"cannot write to {folder}: {error.strerror}.") from error

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.folder / RUN_NAME
        if not path.exists():
            save_text(json.dumps(settings, indent=2) + "\n", path)
            return
        try:
            before = json.loads(path.read_text())
            if not isinstance(before, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise EvaluationError(f"{path} is damaged; choose another --output.") from error
        for name in sorted({*before, *settings}):
            if before.get(name) != settings.get(name):
                raise EvaluationError(
                    f"{self.folder} holds a run with {name}={before.get(name)!r}, not {settings.get(name)!r}; choose "
                    "another --output, or the same settings to continue it."
                )

    def add(self, record: Record) -> None:
        """Adds a record (`append_record`)."""
        append_record(self.path, record)

    def records(self) -> list[Record]:
        """Returns this folder's records; only the last of those with the same key."""
        return read_records([self.path]) if self.path.exists() else []

    def all_records(self) -> list[Record]:
        """Returns the records of this folder and of its other environments."""
        others = sorted((self.folder / ENVIRONMENTS_NAME).glob(f"*/{RECORDS_NAME}"))
        return read_records([path for path in (self.path, *others) if path.exists()])


def append_record(path: Path, record: Record) -> None:
    """Appends a line to a file of records and syncs it to disk. Raises `EvaluationError` if that fails."""
    line = json.dumps(asdict(record)) + "\n"
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            drop_incomplete_line(path)
        raise EvaluationError(
            f"cannot write to {path}: {error.strerror}. Measurements so far are kept: run the same command to continue."
        ) from error


def drop_incomplete_line(path: Path) -> None:
    """Removes the incomplete line that a killed run may have left in a file of records."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with open(path, "r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


def read_records(paths: list[Path]) -> list[Record]:
    """Reads the records of several files; only the last of those with the same key. Raises `EvaluationError`."""
    found: dict[tuple, Record] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise EvaluationError(f"cannot read {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise EvaluationError(f"{path} holds no records of an evaluation.") from error
        for number, line in enumerate(lines, start=1):
            try:
                record = Record(**json.loads(line))
                _check_types(record)
            except (json.JSONDecodeError, TypeError) as error:
                raise EvaluationError(f"{path}, line {number} is not a record of an evaluation.") from error
            found[record.key] = record
    return list(found.values())


def _check_types(record: Record) -> None:
    """Raises `TypeError` if names are not strings or figures have no names."""
    named = (record.metrics, record.details, record.environment, record.basis)
    if not all(isinstance(name, str) for name in record.key) or not all(isinstance(each, dict) for each in named):
        raise TypeError
