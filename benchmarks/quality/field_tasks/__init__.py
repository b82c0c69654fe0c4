"""Standard tasks for `field.py`: RULER, HumanEval, GSM8K and BFCL, one file each, and what runs and scores them.

A suite is a module with `TASKS`, `cases(source)` and `score(case, text)`. Cases are token ids, so that every engine
gets the same input.
"""

from __future__ import annotations

from types import ModuleType

from hf_diffkv.evaluation.errors import EvaluationError, unknown

from . import bfcl, gsm8k, humaneval, ruler

SUITES: dict[str, ModuleType] = {"ruler": ruler, "humaneval": humaneval, "gsm8k": gsm8k, "bfcl": bfcl}


def suite_of(task: str) -> ModuleType:
    """Returns the suite of a task. Raises `EvaluationError` if there is none."""
    for suite in SUITES.values():
        if task in suite.TASKS:
            return suite
    raise unknown("task", task, [name for suite in SUITES.values() for name in suite.TASKS])


def chosen_tasks(suite: str, names: str | None) -> tuple[str, ...]:
    """Returns the tasks of a suite named in a comma-separated list; None names all."""
    known = SUITES[suite].TASKS
    if names is None:
        return known
    given = tuple(name.strip() for name in names.split(",") if name.strip())
    if not given:
        raise EvaluationError(f"--tasks names no task; give some of {', '.join(known)}.")
    for name in given:
        if name not in known:
            raise unknown(f"task of {suite}", name, known)
    return given
