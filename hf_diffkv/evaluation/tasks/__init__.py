"""Tasks to evaluate methods on, one small file each. Each module registers classes that take no arguments."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import EvaluationError
from ..registry import Registry
from .base import Document, Metric, Task

TASKS: Registry[Callable[[], Task]] = Registry("task", __name__)
# decorator for the class of a task, called with its name
task = TASKS.add
# tasks and suites that lm-evaluation-harness runs instead, by their former names here
HARNESS_TASKS = {
    "gsm8k": "gsm8k",
    "math": "minerva_math",
    "math-500": "minerva_math500",
    "aime24": "aime24",
    "mmlu": "mmlu_flan_cot_zeroshot",
    "mmlu-pro": "mmlu_pro",
    "gpqa": "gpqa_diamond_cot_zeroshot",
    "humaneval": "humaneval",
    "humaneval-plus": "humaneval_plus",
    "mbpp-plus": "mbpp_plus",
    "ruler": "ruler",
    "ruler-common-words": "ruler_cwe",
    "ruler-frequent-words": "ruler_fwe",
    "ruler-qa-1": "ruler_qa_squad",
    "ruler-qa-2": "ruler_qa_hotpot",
    "ruler-variable-tracking": "ruler_vt",
    "longbench": "longbench",
}


def suites() -> dict[str, list[str]]:
    """Returns the names of tasks by suite."""
    found: dict[str, list[str]] = {}
    for name in TASKS.names():
        for suite in get_task(name).suites:
            found.setdefault(suite, []).append(name)
    return found


def get_task(name: str) -> Task:
    """Makes the task `name`. Raises `EvaluationError` with suggestions if there is none, or if the harness has it."""
    harness = harness_task(name)
    if harness is not None:
        raise EvaluationError(
            f"task {name!r} is run by lm-evaluation-harness: hf-diffkv lm-eval --model hf-diffkv --model_args "
            f"pretrained=MODEL,cache=METHOD --tasks {harness}"
        )
    found = TASKS.find(name)()
    found.name = name
    return found


def harness_task(name: str) -> str | None:
    """Returns lm-evaluation-harness's name for a task formerly called `name` here, or None."""
    if name.startswith("longbench-"):
        return name.replace("-", "_").replace("repobench_p", "repobench-p")
    if name.startswith("ruler-niah-"):
        return name.removeprefix("ruler-").replace("-", "_")
    return HARNESS_TASKS.get(name)


__all__ = ["TASKS", "Document", "Metric", "Task", "get_task", "suites", "task"]
