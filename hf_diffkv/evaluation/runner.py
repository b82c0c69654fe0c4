"""Runs methods on tasks document by document, starting with the dense cache, to which others are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from .basis import bases_of, same_basis
from .environment import describe_environment
from .errors import EvaluationError, one_line
from .methods import HeldBytes, Method, get_method
from .methods.dense import DENSE
from .records import Record, RunFolder
from .session import Session
from .tasks import Document, Task
from .tasks.base import Source, Sums


def documents_of(task: Task, source: Source) -> list[Document]:
    """Makes the documents of a task; a count of 0 or a length of None in `source` stands for the task's own."""
    return task.documents(replace(source, count=source.count or task.count, length=source.length or task.length))


def longest(documents: Sequence[Document]) -> int:
    """Returns the maximum number of tokens of any document that a cache sees."""
    return max((document.tokens for document in documents), default=0)


def check_fits(task: Task, documents: Sequence[Document], limit: int | None) -> None:
    """Raises `EvaluationError` if a document is longer than the model's `limit`."""
    needed = longest(documents)
    if limit is not None and needed > limit:
        raise EvaluationError(
            f"task {task.name!r} needs {needed} tokens but the model's max_position_embeddings is {limit}; lower "
            "--length or --max-new-tokens, or leave the task out."
        )


def run(
    model: Any,
    methods: Sequence[Method],
    tasks: Sequence[tuple[Task, list[Document]]],
    folder: RunFolder,
    *,
    retry: bool = False,
    quiet: bool = False,
) -> None:
    """Adds a record to `folder` for every method and document without a record of the same basis (`basis.bases_of`).

    Args:
        retry: whether to repeat documents that failed before.
    """
    bases = bases_of(model, methods)
    known = [record for record in folder.records() if record.method in bases]
    done = {record.key: record for record in known if same_basis(record, bases[record.method])}
    if retry:
        done = {key: record for key, record in done.items() if record.error is None}
    environment = describe_environment(model.device)
    work = sum(len(documents) for _, documents in tasks) * len(methods)
    with tqdm(total=work, unit="run", disable=quiet or None, dynamic_ncols=True) as bar:
        runner = _Runner(model, folder, environment, bases, bar)
        for task, documents in tasks:
            for document in documents:
                missing = [method for method in methods if _key(method, task, document) not in done]
                bar.update(len(methods) - len(missing))
                if missing:
                    runner.run(task, document, missing)


class _Runner:
    """Measures methods on documents and keeps the records, with bases by method label."""

    def __init__(
        self,
        model: Any,
        folder: RunFolder,
        environment: dict[str, Any],
        bases: dict[str, dict[str, Any]],
        bar: tqdm,
    ) -> None:
        self.model, self.folder, self.bar = model, folder, bar
        self.environment, self.bases = environment, bases

    def run(self, task: Task, document: Document, methods: Sequence[Method]) -> None:
        """Measures each method on a document, starting with the dense cache, the reference."""
        dense = next((method for method in methods if method.label == DENSE), None)
        reference, observed = self._measure(dense or get_method(DENSE), task, document)
        if dense is not None:
            self._keep(reference)
        for method in methods:
            if method is dense:
                continue
            if reference.error is not None:
                self._keep(Record(*_key(method, task, document), error=f"dense: {reference.error}"))
            else:
                self._keep(self._measure(method, task, document, reference, observed)[0])

    def _keep(self, record: Record) -> None:
        record.environment.update(self.environment)
        record.basis.update(self.bases[record.method])
        self.folder.add(record)
        if record.error is not None:
            self.bar.write(f"{record.method} failed on {record.document}: {record.error}")
        self.bar.update(1)

    def _measure(
        self, method: Method, task: Task, document: Document, dense: Record | None = None, expected: Any = None
    ) -> tuple[Record, Any]:
        """Returns one method's record, with an error if it fails, and the task's observations.

        Args:
            dense, expected: record and observations of the dense cache; None for the dense cache itself.
        """
        self.bar.set_description(f"{document.name} {method.label}")
        key = _key(method, task, document)
        started = time.perf_counter()
        try:
            sums, observed, details = task.measure(Session(self.model, method), document, expected)
        except EvaluationError:
            raise
        except Exception as problem:
            # any error from another library's cache is a result and must not end the run
            error = one_line(f"{type(problem).__name__}: {problem}")
            return Record(*key, error=error, seconds=time.perf_counter() - started), None
        return _record(key, sums, details, dense, time.perf_counter() - started), observed


def _key(method: Method, task: Task, document: Document) -> tuple[str, str, str, str]:
    return method.label, task.name, document.name, document.digest


def _record(key: tuple[str, ...], sums: Sums, details: dict[str, Any], dense: Record | None, seconds: float) -> Record:
    held: HeldBytes = details.pop("held")
    dense_bytes = held.bytes if dense is None else dense.bytes
    return Record(
        *key,
        metrics=sums,
        bytes=held.bytes,
        payload_bytes=held.payload_bytes,
        dense_bytes=dense_bytes,
        simulated=held.simulated,
        seconds=seconds,
        details=details if held.levels is None else {**details, "levels": held.levels},
    )
