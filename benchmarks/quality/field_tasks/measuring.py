"""Runs methods on cases, with a record on disk after each, and joins answers from other engines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_diffkv.evaluation.basis import bases_of, same_basis
from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.errors import EvaluationError, one_line
from hf_diffkv.evaluation.methods import HeldBytes, Method
from hf_diffkv.evaluation.records import Record, append_record, drop_incomplete_line, read_records

from . import suite_of
from .answers import Answer, Answering
from .batches import answer_together, batches_of
from .cases import Case, answer_text

SCORE = "score"
# required and optional fields of another engine's answer
NEEDED = ("method", "task", "name", "digest", "ids", "seconds")
OPTIONAL = ("bytes", "payload_bytes", "dense_bytes", "environment", "basis", "error")


class Records:
    """Records of one model: a file of JSON lines for each task.

    Args:
        folder: folder of the model, created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, task: str) -> Path:
        return self.folder / f"{task}.jsonl"

    def of(self, task: str) -> list[Record]:
        """Returns the records of a task; if several have the same key, the last one counts."""
        path = self.path(task)
        if not path.exists():
            return []
        drop_incomplete_line(path)
        return read_records([path])

    def of_cases(self, cases: Iterable[Case]) -> list[Record]:
        """Returns the records of all tasks that the cases belong to."""
        return [record for task in dict.fromkeys(case.task for case in cases) for record in self.of(task)]

    def add(self, record: Record) -> None:
        """Adds a record to the file of its task (`append_record`)."""
        append_record(self.path(record.task), record)


def measure(
    model: Any,
    tokenizer: Any,
    methods: Sequence[Method],
    cases: Sequence[Case],
    records: Records,
    *,
    share: bool = False,
    batch: int = 1,
    retry: bool = False,
    quiet: bool = False,
) -> None:
    """Adds a record for every method and case that has none of the same basis (`basis.bases_of`).

    Args:
        model, tokenizer: loaded model and its tokenizer.
        methods: methods to run on each case or batch, one after the other.
        cases: cases in the order in which they are run, unless in batches.
        records: records of the model.
        share: whether prompts are read once for several methods (`shared_prompts.py`).
        batch: number of cases answered at once, if the method can (`batches.py`).
        retry: whether to repeat what failed before.
        quiet: whether to hide the progress bar.
    """
    bases = bases_of(model, methods)
    done = {
        record.key
        for record in records.of_cases(cases)
        if record.method in bases and same_basis(record, bases[record.method]) and not (retry and record.error)
    }
    environment = describe_environment(model.device)
    answering = Answering(model, share)
    groups = [[case] for case in cases] if batch == 1 else batches_of(cases, batch)
    with tqdm(total=len(cases) * len(methods), unit="answer", disable=quiet or None, dynamic_ncols=True) as bar:
        for group, method in itertools.product(groups, methods):
            left = [case for case in group if (method.label, case.task, case.name, case.digest) not in done]
            bar.update(len(group) - len(left))
            for together in [left] if method.batches and len(left) > 1 else [[case] for case in left]:
                bar.set_description(f"{together[0].task} {together[0].name} {method.label}")
                for record in _measured(answering, tokenizer, method, together):
                    record.environment.update(environment)
                    record.basis.update(bases[method.label])
                    records.add(record)
                    if record.error is not None:
                        bar.write(f"{method.label} failed on {record.task} {record.document}: {record.error}")
                bar.update(len(together))


def _measured(answering: Answering, tokenizer: Any, method: Method, cases: Sequence[Case]) -> list[Record]:
    started = time.perf_counter()
    try:
        if len(cases) == 1:
            answers = [answering.answer(method, cases[0])]
        else:
            answers = answer_together(answering.model, method, cases, answering.bytes_per_token)
    except EvaluationError:
        raise
    except Exception as problem:
        # any error of another library's cache is a result and must not end the run
        error = one_line(f"{type(problem).__name__}: {problem}")
        seconds = (time.perf_counter() - started) / len(cases)
        return [Record(method.label, case.task, case.name, case.digest, error=error, seconds=seconds) for case in cases]
    return [record_of(method.label, tokenizer, case, answer) for case, answer in zip(cases, answers)]


def record_of(label: str, tokenizer: Any, case: Case, answer: Answer) -> Record:
    """Scores an answer and returns its record, without environment and basis."""
    text = answer_text(tokenizer, case, answer.ids)
    held = answer.held
    details = {
        "prompt_tokens": case.tokens,
        "generated_tokens": len(answer.ids),
        "shared_prompt": answer.shared,
        "batch": answer.batch,
        "ended": bool(answer.ids) and answer.ids[-1] in case.ends,
        "text": text,
    }
    return Record(
        label,
        case.task,
        case.name,
        case.digest,
        metrics={SCORE: (suite_of(case.task).score(case, text), 1.0)},
        bytes=None if held is None else held.bytes,
        payload_bytes=None if held is None else held.payload_bytes,
        dense_bytes=answer.dense_bytes,
        simulated=held is not None and held.simulated,
        seconds=answer.seconds,
        details=details,
    )


def join(tokenizer: Any, cases: Iterable[Case], lines: Iterable[Mapping[str, Any]], records: Records) -> int:
    """Scores the answers of another engine and adds their records, except for those that already exist.

    Args:
        tokenizer: tokenizer of the model.
        cases: cases that the engine may have answered.
        lines: answers, with the fields `NEEDED` and optionally `OPTIONAL`; `ids` are the generated token ids.
        records: records of the model.

    Returns:
        The number of records added.

    Raises:
        EvaluationError: a line has other fields, or answers none of the cases.
    """
    by_key = {(case.task, case.name, case.digest): case for case in cases}
    known = {record.key for record in records.of_cases(by_key.values())}
    added = 0
    for number, line in enumerate(lines, start=1):
        missing = [name for name in NEEDED if name not in line]
        other = sorted(set(line) - {*NEEDED, *OPTIONAL})
        if missing or other:
            raise EvaluationError(f"answer {number} lacks {missing} or has unknown fields {other}.")
        case = by_key.get((line["task"], line["name"], line["digest"]))
        if case is None:
            raise EvaluationError(
                f"answer {number} ({line['task']} {line['name']}, digest {line['digest']}) is to none of these cases; "
                "give the options with which the prompts were written."
            )
        record = joined_record(tokenizer, case, line)
        if record.key not in known:
            records.add(record)
            known.add(record.key)
            added += 1
    return added


def joined_record(tokenizer: Any, case: Case, line: Mapping[str, Any]) -> Record:
    """Scores a line of another engine's answers (`join`) and returns its record."""
    if line.get("error"):
        record = Record(line["method"], case.task, case.name, case.digest, error=line["error"], seconds=line["seconds"])
    else:
        held = HeldBytes(line["bytes"], line.get("payload_bytes")) if line.get("bytes") is not None else None
        answer = Answer(tuple(line["ids"]), held, line.get("dense_bytes"), line["seconds"])
        record = record_of(line["method"], tokenizer, case, answer)
    record.environment.update(line.get("environment") or {})
    record.basis.update(line.get("basis") or {})
    return record
