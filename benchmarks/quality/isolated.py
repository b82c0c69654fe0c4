"""Runs methods in a separate environment, in a process of that environment's Python (`worker.py`, or another).

The process receives the documents as token ids, loads the model and computes its own dense reference. It writes to its
own subfolder of the run, so that an interrupted run can continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import Method
from hf_diffkv.evaluation.records import ENVIRONMENTS_NAME, Record, RunFolder
from hf_diffkv.evaluation.tasks import Document, Task
from hf_diffkv.running.models import CHECKOUT

WORKER = Path(__file__).with_name("worker.py")
# folder of the environments of `make NAME`; a complete environment contains this file
ENVIRONMENTS = CHECKOUT / "build" / "envs"
READY_NAME = ".ready"
# seconds that a terminated process has to exit
ENDING_SECONDS = 10


class Isolated:
    """An environment that `make NAME` builds, for `Method.environment`.

    Attributes:
        name: name of the environment.
        worker: script that runs a job in it.
    """

    def __init__(self, name: str, worker: Path = WORKER) -> None:
        self.name, self.worker = name, worker

    def further(self, model: str, tasks: Sequence[tuple[Task, list[Document]]]) -> dict[str, Any]:
        """Returns further entries of a job for the worker. Raises `EvaluationError` if it cannot run the model."""
        return {}

    def find_python(self) -> Path | None:
        """Returns the Python of the environment, or None if it has not been built."""
        folder = ENVIRONMENTS / self.name
        python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        return python if python.exists() and (folder / READY_NAME).exists() else None

    def run(
        self,
        methods: Sequence[Method],
        tasks: Sequence[tuple[Task, list[Document]]],
        folder: RunFolder,
        *,
        model: str,
        device: str | None = None,
        retry: bool = False,
        quiet: bool = False,
    ) -> list[Record]:
        """Runs methods of this environment.

        Args:
            methods: methods to run.
            tasks, retry, quiet: arguments for `runner.run`.
            folder: folder of the run; records go into its subfolder `environments/NAME`.
            model, device: name and device as in `models.load_model`.

        Returns:
            Records with an error for documents that the environment could not run at all. These are not written, so the
            next run tries again.
        """
        labels = [method.label for method in methods]
        job = {
            "model": model,
            "device": device,
            "settings": folder.settings,
            "folder": str(folder.folder / ENVIRONMENTS_NAME / self.name),
            "methods": labels,
            "tasks": [(task.name, [asdict(document) for document in documents]) for task, documents in tasks],
            "retry": retry,
            "quiet": quiet,
        }
        try:
            self.run_job({**job, **self.further(model, tasks)})
            return []
        except EvaluationError as error:
            reason = str(error)
        found = {record.key for record in folder.all_records()}
        missing = [
            Record(label, task.name, document.name, document.digest, error=reason)
            for label in labels
            for task, documents in tasks
            for document in documents
        ]
        return [record for record in missing if record.key not in found]

    def run_job(self, job: dict[str, Any]) -> None:
        """Runs a job. Raises `EvaluationError` if there is no environment, or the job did not finish."""
        python = self.find_python()
        if python is None:
            raise EvaluationError(f"it needs an environment of its own: make {self.name}")
        # only this checkout is on the path, so that this environment's packages are not found there
        variables = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        # a worker imports modules next to it
        variables.pop("PYTHONSAFEPATH", None)
        command = [str(python), str(self.worker)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
        line = ""
        try:
            # if the process ended before reading everything, its exit code says so
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(job))
            for line in process.stdout:
                print(line, end="", flush=True)
            process.wait()
        finally:
            _end(process)
        if process.returncode:
            said = line.strip() if process.returncode == 2 else f"its process ended with exit code {process.returncode}"
            raise EvaluationError(f"environment {self.name}: {said}")


def _end(process: subprocess.Popen) -> None:
    """Ends a process that is still running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
