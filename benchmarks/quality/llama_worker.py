"""Runs a job of `isolated.py` from standard input with llama.cpp, without PyTorch and Transformers.

The reference is llama.cpp's own f16 cache with the same GGUF file, which differs from its other caches only in the
types. A type also affects how the prompt is read, because every token attends to what the cache already holds.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from job import run_job
from llama_context import EXACT, FAMILY, THREADS, CacheTypes, Held, LlamaCpp, parse_types

from hf_diffkv.evaluation.documents import Document, read_document
from hf_diffkv.evaluation.environment import describe_versions, installed, processor
from hf_diffkv.evaluation.errors import EvaluationError, one_line
from hf_diffkv.evaluation.records import Record, RunFolder
from hf_diffkv.version import __version__

PACKAGE = "llama-cpp-python"
# positions compared at once
CHUNK_POSITIONS = 64
Sums = dict[str, tuple[float, float]]


def main() -> int:
    return run_job(work)


def work(job: dict[str, Any]) -> None:
    """Runs the methods of a job on its documents. Raises `EvaluationError` if they cannot be run."""
    if job["device"] not in (None, "cpu"):
        raise EvaluationError(f"llama.cpp is measured on CPUs, not on {job['device']}.")
    run(LlamaCpp(Path(job["gguf"])), job)


def run(program: Any, job: dict[str, Any]) -> None:
    """Adds a record to the job's folder for every method and document without a record of the same basis.

    Args:
        program: a `LlamaCpp` of the file `job["gguf"]`.
        job: job, with the names of tasks whose questions follow each other as `in_turn`.
    """
    folder = RunFolder(Path(job["folder"]), job["settings"])
    methods = {label: parse_types(label.removeprefix(f"{FAMILY}:").split("+")) for label in job["methods"]}
    shared = {
        "environment": {**describe_versions(), "device": processor(), "threads": THREADS},
        "basis": {
            "code": __version__,
            "weights": _digest(Path(job["gguf"])),
            "dtype": job["settings"]["dtype"],
            "device": "cpu",
            "packages": installed([PACKAGE]),
        },
    }
    known = [record for record in folder.records() if record.basis == shared["basis"]]
    done = {record.key for record in known if record.error is None or not job["retry"]}
    for task, documents in job["tasks"]:
        for document in map(read_document, documents):
            missing = {
                m: types for m, types in methods.items() if (m, task, document.name, document.digest) not in done
            }
            for record in records_of(program, missing, task, document, task in job["in_turn"]):
                record.environment.update(shared["environment"])
                record.basis.update(shared["basis"])
                folder.add(record)
                if record.error is not None:
                    print(f"{record.method} failed on {record.document}: {record.error}", flush=True)
                elif not job["quiet"]:
                    print(f"{record.method}: {record.document} in {record.seconds:.0f} s", flush=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Measured:
    """Result of one document.

    Attributes:
        sums: sum and weight by metric.
        logits: logits of all compared positions, [positions, vocabulary].
        right: whether each answer is correct; None for a continuation.
        held: memory used with the prompt in the cache.
        seconds: time for the whole document.
    """

    sums: Sums
    logits: np.ndarray
    right: list[bool] | None
    held: Held
    seconds: float


def records_of(
    program: Any, methods: dict[str, CacheTypes], task: str, document: Document, in_turn: bool = False
) -> Iterator[Record]:
    """Measures methods on a document, after the f16 cache with which they are compared.

    Args:
        program: a `LlamaCpp`.
        methods: types by method label.
        task: name of the document's task.
        document: document to measure.
        in_turn: whether a question sees earlier questions and answers.

    Yields:
        A record for each method, with an error if it failed.
    """
    key = (task, document.name, document.digest)
    exact = _attempt(program, EXACT, document, None, in_turn) if methods else ""
    for label, types in methods.items():
        if isinstance(exact, str):
            yield Record(label, *key, error=exact if types == EXACT else f"f16: {exact}")
            continue
        mine = exact if types == EXACT else _attempt(program, types, document, exact, in_turn)
        if isinstance(mine, str):
            yield Record(label, *key, error=mine)
            continue
        yield Record(
            label,
            *key,
            metrics=mine.sums,
            bytes=mine.held.bytes,
            payload_bytes=mine.held.payload_bytes,
            dense_bytes=exact.held.bytes,
            seconds=mine.seconds,
            details={} if mine.right is None else {"answers": mine.right},
        )


def _attempt(
    program: Any, types: CacheTypes, document: Document, reference: Measured | None, in_turn: bool
) -> Measured | str:
    """Calls `measure` and returns its result, or the reason why it failed."""
    try:
        return measure(program, types, document, reference, in_turn)
    except Exception as problem:
        # any error in llama.cpp is a result and must not end the run
        return one_line(problem)


def measure(
    program: Any, types: CacheTypes, document: Document, reference: Measured | None, in_turn: bool = False
) -> Measured:
    """Measures one document like the tasks `AskingTask` and `TextTask`, which read a prompt once.

    Args:
        program: a `LlamaCpp`.
        types: types of the cache.
        document: document to measure.
        reference: result with the f16 cache; None for that cache itself.
        in_turn: whether a question sees earlier questions and answers.

    Raises:
        ValueError: the document has neither questions nor a continuation.
    """
    if not document.questions and not document.continuation:
        raise ValueError("llama.cpp is measured on tasks that ask and on the task text.")
    began = time.perf_counter()
    cache = program.new_cache(types, document.tokens)
    try:
        cache.forward(document.context)
        held = cache.held()
        if document.questions:
            observed = _ask(cache, document, in_turn)
            ids = [token for _, answer in document.questions for token in answer]
        else:
            ids = list(document.continuation[1:])
            observed = [cache.forward(document.continuation[:-1], keep=len(ids))]
    finally:
        cache.close()
    logits = np.concatenate(observed)
    sums = compare_logits(logits, logits if reference is None else reference.logits, ids)
    right = None
    if document.questions:
        answers = [answer for _, answer in document.questions]
        right = [bool((found.argmax(-1) == answer).all()) for found, answer in zip(observed, answers)]
        known = right if reference is None else reference.right or []
        sums["right"] = (float(sum(a and b for a, b in zip(right, known))), float(sum(known)))
    return Measured(sums, logits, right, held, time.perf_counter() - began)


def _ask(cache: Any, document: Document, in_turn: bool) -> list[np.ndarray]:
    """Returns the logits of each answer's tokens, [tokens, vocabulary]; answers are fed in after their questions."""
    observed = []
    before: tuple[int, ...] = ()
    for question, answer in document.questions:
        observed.append(cache.forward((*before, *question, *answer[:-1]), keep=len(answer)))
        if in_turn:
            before = answer[-1:]
        else:
            cache.forget(len(document.context))
    return observed


def compare_logits(logits: np.ndarray, reference: np.ndarray, ids: Sequence[int]) -> Sums:
    """Returns the same as `hf_diffkv.evaluation.comparison.compare_logits`, which needs PyTorch."""
    kl = top1 = nll = 0.0
    for start in range(0, len(ids), CHUNK_POSITIONS):
        part = slice(start, start + CHUNK_POSITIONS)
        mine, theirs = _log_softmax(logits[part]), _log_softmax(reference[part])
        kl += float((np.exp(theirs) * (theirs - mine)).sum())
        top1 += float((mine.argmax(-1) == theirs.argmax(-1)).sum())
        nll -= float(mine[np.arange(len(mine)), list(ids[part])].sum())
    count = float(len(ids))
    return {"kl": (max(kl, 0.0), count), "top1": (top1, count), "nll": (nll, count)}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


if __name__ == "__main__":
    sys.exit(main())
