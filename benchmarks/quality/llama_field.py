"""Answers one field task case with llama.cpp: a job on standard input (`field_tasks/by_llama_cpp.py`).

The answers are written as JSON lines for `field.py join`. The script needs neither PyTorch nor Transformers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from job import run_job
from llama_context import EXACT, FAMILY, CacheTypes, LlamaCpp, parse_types

from hf_diffkv.evaluation.environment import describe_versions, installed, processor
from hf_diffkv.evaluation.errors import one_line
from hf_diffkv.version import __version__


def main() -> int:
    return run_job(work)


def work(job: dict[str, Any]) -> None:
    """Writes each method's answer to a job to its file."""
    run(LlamaCpp(Path(job["gguf"]), job["threads"]), job)


def run(program: Any, job: dict[str, Any]) -> None:
    """Writes each method's answer to a job to its file, or an error if there is none.

    Args:
        program: a `LlamaCpp`.
        job: labels of `methods`, the `case` in JSON form, and the file `answers`.
    """
    environment = {**describe_versions(), "device": processor(), "threads": program.threads}
    basis = {"code": __version__, "device": "cpu", "packages": installed(["llama-cpp-python"])}
    case = job["case"]
    named = {name: case[name] for name in ("task", "name", "digest")} | {"environment": environment, "basis": basis}
    with open(job["answers"], "w", encoding="utf-8") as file:
        for label in job["methods"]:
            started = time.perf_counter()
            try:
                found = answer(program, parse_types(label.removeprefix(f"{FAMILY}:").split("+")), case)
            except Exception as problem:
                # any error in llama.cpp is a result and must not end the run
                found = {"ids": [], "seconds": time.perf_counter() - started, "error": one_line(problem)}
            file.write(json.dumps({"method": label, **named, **found}) + "\n")


def answer(program: Any, types: CacheTypes, case: Mapping[str, Any]) -> dict[str, Any]:
    """Continues the prompt of a case greedily.

    Returns:
        Generated token ids, seconds for the prompt and the answer without earlier turns, and bytes at the end.
    """
    cache = program.new_cache(types, len(case["earlier"]) + len(case["ids"]) + case["limit"])
    try:
        if case["earlier"]:
            cache.forward(case["earlier"])
        started, ids = time.perf_counter(), []
        logits = cache.forward(case["ids"])
        while True:
            ids.append(int(logits[-1].argmax()))
            if ids[-1] in case["ends"] or len(ids) == case["limit"]:
                break
            logits = cache.forward(ids[-1:])
        seconds, held = time.perf_counter() - started, cache.held()
        dense = program.shape.held(EXACT, cache.tokens).bytes
    finally:
        cache.close()
    sizes = {"bytes": held.bytes, "payload_bytes": held.payload_bytes, "dense_bytes": dense}
    return {"ids": ids, "seconds": seconds, **sizes}


if __name__ == "__main__":
    sys.exit(main())
