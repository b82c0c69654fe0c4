"""What methods are judged by, one small file each. A module registers a class without arguments."""

from __future__ import annotations

from collections.abc import Callable

from ..registry import Registry
from .base import Document, Metric, Task

TASKS: Registry[Callable[[], Task]] = Registry("task", __name__)


def task(name: str) -> Callable:
    """Decorator for the class of a task."""
    return TASKS.add(name)


def suites() -> dict[str, list[str]]:
    """Names of tasks by suite."""
    found: dict[str, list[str]] = {}
    for name in TASKS.names():
        for suite in get_task(name).suites:
            found.setdefault(suite, []).append(name)
    return found


def get_task(name: str) -> Task:
    """The task called `name`; `EvaluationError` with suggestions where there is none."""
    found = TASKS.find(name)()
    found.name = name
    return found


__all__ = ["TASKS", "Document", "Metric", "Task", "get_task", "suites", "task"]
