"""Shared by the tests of the benchmarks: loads their scripts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    threads = torch.get_num_threads()
    yield load
    # scripts choose their own
    torch.set_num_threads(threads)
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)
