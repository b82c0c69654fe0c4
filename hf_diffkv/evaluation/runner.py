"""Runs methods on tasks, document by document, the dense cache first: it is what the others are compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from .environment import describe_environment
from .errors import EvaluationError
from .methods import Held, Method, get_method
from .methods.dense import DENSE
from .records import Record, RunFolder
from .session import Session
from .tasks import Document, Task
from .tasks.base import Source


def documents_of(task: Task, tokenizer: Any, count: int | None, length: int | None, seed: int) -> list[Document]:
    """The documents of a task with its own count and length where none is given."""
    return task.documents(Source(tokenizer, count or task.count, length or task.length, seed))


def check_fits(task: Task, documents: Sequence[Document], model: Any) -> None:
    """Raises `EvaluationError` where the model is too short for a document."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max((document.tokens for document in documents), default=0)
    if limit is not None and longest > limit:
        raise EvaluationError(
            f"task {task.name!r} needs {longest} tokens but the model's max_position_embeddings is {limit}; lower "
            "--length or leave the task out."
        )


def run(
    model: Any,
    tokenizer: Any,
    methods: Sequence[Method],
    tasks: Sequence[tuple[Task, list[Document]]],
    folder: RunFolder,
    *,
    retry: bool = False,
    quiet: bool = False,
) -> None:
    """Adds a record to `folder` for every method and document that has none.

    Args:
        tasks: with their documents.
        retry: run again what failed before.
        quiet: no progress bar.
    """
    done = {record.key: record for record in folder.records()}
    if retry:
        done = {key: record for key, record in done.items() if record.error is None}
    environment = describe_environment(model.device)
    work = sum(len(documents) for _, documents in tasks) * len(methods)
    with tqdm(total=work, unit="run", disable=quiet or None, dynamic_ncols=True) as bar:
        for task, documents in tasks:
            for document in documents:
                missing = [m for m in methods if (m.label, task.name, document.name, document.digest) not in done]
                bar.update(len(methods) - len(missing))
                if missing:
                    _run_document(model, tokenizer, missing, task, document, folder, environment, bar)


def _run_document(
    model: Any,
    tokenizer: Any,
    methods: list[Method],
    task: Task,
    document: Document,
    folder: RunFolder,
    environment: dict[str, Any],
    bar: tqdm,
) -> None:
    dense = next((method for method in methods if method.label == DENSE), None)
    bar.set_description(f"{document.name} {DENSE}")
    record, reference = _measure(model, tokenizer, dense or get_method(DENSE), task, document, None, None)
    if dense is not None:
        _keep(folder, record, environment, bar)
    for method in methods:
        if method is dense:
            continue
        bar.set_description(f"{document.name} {method.label}")
        if record.error is not None:
            failed = Record(method.label, task.name, document.name, document.digest, error=f"dense: {record.error}")
        else:
            failed, _ = _measure(model, tokenizer, method, task, document, reference, record.bytes)
        _keep(folder, failed, environment, bar)


def _keep(folder: RunFolder, record: Record, environment: dict[str, Any], bar: tqdm) -> None:
    record.environment.update(environment)
    folder.add(record)
    if record.error is not None:
        bar.write(f"{record.method} failed on {record.document}: {record.error}")
    bar.update(1)


def _measure(
    model: Any,
    tokenizer: Any,
    method: Method,
    task: Task,
    document: Document,
    reference: Any,
    dense_bytes: int | None,
) -> tuple[Record, Any]:
    """The record of one method and what it observed; a method that fails is a record that says why."""
    key = (method.label, task.name, document.name, document.digest)
    started = time.perf_counter()
    try:
        sums, observed, details = task.measure(Session(model, method, tokenizer), document, reference)
    except EvaluationError:
        raise
    except Exception as error:
        # whatever a cache of another library raises is a result and must not end the run
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Record(*key, error=reason, seconds=time.perf_counter() - started), None
    held: Held = details.pop("held")
    record = Record(
        *key,
        metrics=sums,
        bytes=held.bytes,
        payload_bytes=held.payload_bytes,
        dense_bytes=held.bytes if dense_bytes is None else dense_bytes,
        simulated=held.simulated,
        seconds=time.perf_counter() - started,
        details=details if held.levels is None else {**details, "levels": held.levels},
    )
    return record, observed
