"""Runs llama.cpp's caches on cases, each case in a new process in their environment."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_context import FAMILY
from methods.llama_cpp import LlamaCppEnvironment, find_gguf
from tqdm.auto import tqdm

from hf_diffkv.evaluation.methods import Method

from .cases import Case
from .measuring import Records, joined_record

ENVIRONMENT = LlamaCppEnvironment(FAMILY, Path(__file__).parents[1] / "llama_field.py")


def measure_by_llama_cpp(
    model: str,
    tokenizer: Any,
    methods: Sequence[Method],
    cases: Sequence[Case],
    records: Records,
    *,
    threads: int | None = None,
    retry: bool = False,
    quiet: bool = False,
) -> None:
    """Adds a record for every llama.cpp method and case that has none.

    Args:
        model: name of the model, whose GGUF file is next to its folder.
        tokenizer: tokenizer of the model.
        methods: methods that run in the environment of `make llama-cpp`.
        cases: cases in the order in which they are run.
        records: records of the model.
        threads: number of threads; None takes `llama_context.THREADS`.
        retry: whether to repeat what failed before.
        quiet: whether to hide the progress bar.

    Raises:
        EvaluationError: the GGUF file or the environment is missing, or its process failed.
    """
    gguf = str(find_gguf(model))
    done = {record.key for record in records.of_cases(cases) if not (retry and record.error)}
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=len(cases) * len(methods), unit="answer", disable=quiet or None, dynamic_ncols=True) as bar,
    ):
        answers = Path(folder) / "answers.jsonl"
        for case in cases:
            bar.set_description(f"{case.task} {case.name} {FAMILY}")
            key = (case.task, case.name, case.digest)
            missing = [method.label for method in methods if (method.label, *key) not in done]
            if missing:
                told = {**asdict(case), "digest": case.digest}
                job = {"gguf": gguf, "threads": threads, "methods": missing, "case": told, "answers": str(answers)}
                ENVIRONMENT.run_job(job)
                for line in answers.read_text(encoding="utf-8").splitlines():
                    record = joined_record(tokenizer, case, json.loads(line))
                    records.add(record)
                    if record.error is not None:
                        bar.write(f"{record.method} failed on {case.task} {case.name}: {record.error}")
            bar.update(len(methods))
