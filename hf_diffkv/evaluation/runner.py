"""Runs methods on tasks document by document, the dense cache first, as others are compared with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from .basis import bases_of, same_basis
from .environment import describe_environment
from .errors import EvaluationError, one_line
from .methods import HeldBytes, Method, get_method
from .methods.dense import DENSE
from .records import Record, RunFolder
from .session import Batch, Session
from .tasks import Document, Task
from .tasks.base import Source, Sums


def documents_of(task: Task, source: Source) -> list[Document]:
    """Makes the documents of a task; a count of 0 and a length of None in `source` take the task's own."""
    return task.documents(replace(source, count=source.count or task.count, length=source.length or task.length))


def longest(documents: Sequence[Document]) -> int:
    """Returns the largest number of tokens that a cache sees of any document."""
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
    tokenizer: Any,
    methods: Sequence[Method],
    tasks: Sequence[tuple[Task, list[Document]]],
    folder: RunFolder,
    *,
    batch_size: int = 1,
    retry: bool = False,
    quiet: bool = False,
) -> None:
    """Adds a record to `folder` for every method and document without a record of the same basis (`basis.bases_of`).

    Args:
        model, tokenizer: loaded model and its tokenizer.
        methods: methods to run.
        tasks: tasks with their documents.
        folder: folder of the run.
        batch_size: number of documents in one cache, if task and method allow it.
        retry: whether to repeat documents that failed before.
        quiet: whether to hide the progress bar.
    """
    bases = bases_of(model, methods)
    known = [record for record in folder.records() if record.method in bases]
    done = {record.key: record for record in known if same_basis(record, bases[record.method])}
    if retry:
        done = {key: record for key, record in done.items() if record.error is None}
    environment = describe_environment(model.device)
    work = sum(len(documents) for _, documents in tasks) * len(methods)
    with tqdm(total=work, unit="run", disable=quiet or None, dynamic_ncols=True) as bar:
        runner = _Runner(model, tokenizer, folder, environment, bases, bar)
        for task, documents in tasks:
            size = batch_size if task.batches else 1
            # documents of similar length need little padding
            documents = sorted(documents, key=lambda document: document.tokens) if size > 1 else documents
            for start in range(0, len(documents), size):
                group = documents[start : start + size]
                missing = {method: [d for d in group if _key(method, task, d) not in done] for method in methods}
                bar.update(len(group) * len(methods) - sum(map(len, missing.values())))
                if any(missing.values()):
                    runner.run(task, {method: found for method, found in missing.items() if found})


class _Runner:
    """Measures methods on documents and keeps the records.

    Args:
        environment: environment of all records.
        bases: bases of the records by the method's label.
        bar: progress bar.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: RunFolder,
        environment: dict[str, Any],
        bases: dict[str, dict[str, Any]],
        bar: tqdm,
    ) -> None:
        self.model, self.tokenizer, self.folder, self.bar = model, tokenizer, folder, bar
        self.environment, self.bases = environment, bases

    def run(self, task: Task, missing: dict[Method, list[Document]]) -> None:
        """Measures each method on its documents, and the dense cache on all of them as the reference."""
        documents = list({document.name: document for found in missing.values() for document in found}.values())
        dense = next((method for method in missing if method.label == DENSE), None)
        wanted = {document.name for document in missing.pop(dense, [])}
        reference = {}
        for document, record, observed in self._measure(dense or get_method(DENSE), task, documents, {}):
            reference[document.name] = record, observed
            if document.name in wanted:
                self._keep(record)
        for method, found in missing.items():
            for document in found:
                error = reference[document.name][0].error
                if error is not None:
                    self._keep(Record(*_key(method, task, document), error=f"dense: {error}"))
            possible = [document for document in found if reference[document.name][0].error is None]
            for _, record, _ in self._measure(method, task, possible, reference):
                self._keep(record)

    def _keep(self, record: Record) -> None:
        record.environment.update(self.environment)
        record.basis.update(self.bases[record.method])
        self.folder.add(record)
        if record.error is not None:
            self.bar.write(f"{record.method} failed on {record.document}: {record.error}")
        self.bar.update(1)

    def _measure(
        self, method: Method, task: Task, documents: list[Document], dense: dict[str, tuple[Record, Any]]
    ) -> Iterator[tuple[Document, Record, Any]]:
        """Yields each document with the record of `method` and its observations; failures give records with an error.

        Args:
            dense: record and observations of the dense cache by document; empty for the dense cache itself.
        """
        size = max(1, len(documents)) if task.batches and method.batches else 1
        for start in range(0, len(documents), size):
            group = documents[start : start + size]
            self.bar.set_description(f"{group[0].name} {method.label}")
            references = [dense[document.name][1] if dense else None for document in group]
            started = time.perf_counter()
            error, results = None, [None] * len(group)
            try:
                results = self._results(method, task, group, references)
            except EvaluationError:
                raise
            except Exception as problem:
                # any error of another library's cache is a result and must not end the run
                error = one_line(f"{type(problem).__name__}: {problem}")
            seconds = (time.perf_counter() - started) / len(group)
            for document, result in zip(group, results):
                key = _key(method, task, document)
                if result is None:
                    yield document, Record(*key, error=error, seconds=seconds), None
                else:
                    sums, observed, details = result
                    reference = dense[document.name][0] if dense else None
                    yield document, _record(key, sums, details, reference, seconds), observed

    def _results(self, method: Method, task: Task, documents: list[Document], references: list[Any]) -> list[Any]:
        if len(documents) > 1:
            return task.measure_batch(Batch(self.model, method, self.tokenizer), documents, references)
        return [task.measure(Session(self.model, method, self.tokenizer), documents[0], references[0])]


def _key(method: Method, task: Task, document: Document) -> tuple[str, str, str, str]:
    return method.label, task.name, document.name, document.digest


def _record(key: tuple[str, ...], sums: Sums, details: dict[str, Any], dense: Record | None, seconds: float) -> Record:
    held: HeldBytes = details.pop("held")
    dense_bytes = held.bytes if dense is None else dense.bytes
    if dense is not None and "tokens" in details:
        # bytes of a dense cache with as many tokens, as a method that writes more must not seem to compress less
        dense_bytes = round(dense_bytes * details["tokens"] / dense.details["tokens"])
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
