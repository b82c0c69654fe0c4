"""A pytest plugin that appends a JSON line as soon as each test ends: `-p pytest_lines --lines FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, help="JSON lines are appended here")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--lines")
    # with several processes, the main one hears of all tests
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(path))


class Lines:
    """Writes the outcome of each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # setup and teardown that passed do not deserve a line
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"kind": "test", "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            row["failed"] = _message(report)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (str(report.longrepr) if crash is None else crash.message)[:300]
