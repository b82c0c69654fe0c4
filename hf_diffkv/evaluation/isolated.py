"""Runs methods that need another environment, in a process of that environment's Python.

The process gets the documents as token ids, loads the model and computes its own dense reference. It writes into its
own folder within the run's folder, so that an interrupted run can continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..import_hook import unregister
from ..running.models import CHECKOUT
from .errors import EvaluationError
from .records import ENVIRONMENTS_NAME, Record, RunFolder

if TYPE_CHECKING:
    from .methods import Method
    from .tasks import Document, Task

# folder of the environments of `make NAME`; a complete one has this file
ENVIRONMENTS = CHECKOUT / "build" / "envs"
READY_NAME = ".ready"
# seconds that a terminated process gets to end
ENDING_SECONDS = 10


def find_python(environment: str) -> Path | None:
    """Returns the Python of an environment, or None if it has not been made."""
    folder = ENVIRONMENTS / environment
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return python if python.exists() and (folder / READY_NAME).exists() else None


def run_isolated(
    methods: Sequence[Method],
    tasks: Sequence[tuple[Task, list[Document]]],
    folder: RunFolder,
    *,
    model: str,
    device: str | None = None,
    retry: bool = False,
    quiet: bool = False,
) -> list[Record]:
    """Runs methods that have an `environment`, one environment after another.

    Args:
        methods: methods with an `environment`.
        tasks, retry, quiet: arguments for `runner.run`.
        folder: folder of the run; records go into its subfolder `environments/NAME`.
        model, device: name and device as in `models.load_model`.

    Returns:
        Records with an error for documents that an environment could not run at all. They are not written, so that
        the next run tries again.
    """
    failed = []
    for environment in dict.fromkeys(method.environment for method in methods):
        mine = [method.label for method in methods if method.environment == environment]
        job = {
            "model": model,
            "device": device,
            "settings": folder.settings,
            "folder": str(folder.folder / ENVIRONMENTS_NAME / environment),
            "methods": mine,
            "tasks": [(task.name, [asdict(document) for document in documents]) for task, documents in tasks],
            "retry": retry,
            "quiet": quiet,
        }
        reason = _run_job(environment, job)
        if reason is not None:
            found = {record.key for record in folder.all_records()}
            missing = [
                Record(label, task.name, document.name, document.digest, error=reason)
                for label in mine
                for task, documents in tasks
                for document in documents
            ]
            failed += [record for record in missing if record.key not in found]
    return failed


def _run_job(environment: str, job: dict[str, Any]) -> str | None:
    """Runs a job and returns the reason why it did not finish, or None."""
    python = find_python(environment)
    if python is None:
        return f"it needs an environment of its own: make {environment}"
    # only this checkout is on the path, as packages of this environment must not be found there
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [str(python), "-m", "hf_diffkv.evaluation.isolated"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
    line = ""
    try:
        # if the process ended before it had read everything, its exit code says so
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(job))
        for line in process.stdout:
            print(line, end="", flush=True)
        process.wait()
    finally:
        _end(process)
    if not process.returncode:
        return None
    said = line.strip() if process.returncode == 2 else f"its process ended with exit code {process.returncode}"
    return f"environment {environment}: {said}"


def _end(process: subprocess.Popen) -> None:
    """Ends a process that is still running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Runs the job on standard input; called by the other environment's Python."""
    # Ctrl-C reaches both processes; the waiting one reports it, this one ends silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # that environment's Transformers may be too old for registration
    unregister()
    job = json.load(sys.stdin)
    try:
        _work(job)
    except EvaluationError as error:
        print(error)
        return 2
    return 0


def _work(job: dict[str, Any]) -> None:
    from ..running.models import load_config, load_model
    from .methods import get_method
    from .runner import run
    from .tasks import get_task

    methods = [get_method(label) for label in job["methods"]]
    tasks = [(get_task(name), [_document(fields) for fields in documents]) for name, documents in job["tasks"]]
    folder = RunFolder(Path(job["folder"]), job["settings"])
    _, tokenizer = load_config(job["model"])
    model = load_model(job["model"], job["settings"]["dtype"], job["device"], job["quiet"])
    run(model, tokenizer, methods, tasks, folder, retry=job["retry"], quiet=job["quiet"])


def _document(fields: dict[str, Any]) -> Document:
    from .tasks import Document

    questions = tuple((tuple(question), tuple(answer)) for question, answer in fields["questions"])
    known = {"questions": questions, **{name: tuple(fields[name]) for name in ("context", "continuation")}}
    return Document(**{**fields, **known})


if __name__ == "__main__":
    sys.exit(main())
