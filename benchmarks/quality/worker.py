"""Runs a job of `isolated.py` from standard input within another environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from job import run_job

from hf_diffkv.evaluation.documents import read_document
from hf_diffkv.import_hook import unregister


def main() -> int:
    # this environment's Transformers may be too old for registration
    unregister()
    return run_job(work)


def work(job: dict[str, Any]) -> None:
    """Runs the methods of a job on its documents. Raises `EvaluationError` if they cannot be run."""
    # adds these methods to the library's
    import methods as methods

    from hf_diffkv.evaluation.methods import get_method
    from hf_diffkv.evaluation.records import RunFolder
    from hf_diffkv.evaluation.runner import run
    from hf_diffkv.evaluation.tasks import get_task
    from hf_diffkv.running.models import load_model

    chosen = [get_method(label) for label in job["methods"]]
    tasks = [(get_task(name), [read_document(fields) for fields in documents]) for name, documents in job["tasks"]]
    folder = RunFolder(Path(job["folder"]), job["settings"])
    model = load_model(job["model"], job["settings"]["dtype"], job["device"], job["quiet"])
    run(model, chosen, tasks, folder, retry=job["retry"], quiet=job["quiet"])


if __name__ == "__main__":
    sys.exit(main())
