"""Shared by the tests of the benchmarks: loads their scripts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    for folder in (FOLDER / "quality", FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    threads = torch.get_num_threads()
    yield importlib.import_module
    # scripts choose their own
    torch.set_num_threads(threads)
    for path in FOLDER.rglob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, Callable], str]:
    """Function that has a script write its report between the marks of a document, and returns the document's text."""

    def report(module: ModuleType, mark: str, write: Callable[[], None]) -> str:
        document = tmp_path / "document.md"
        document.write_text(f"before\n<!-- {mark} -->\nold\n<!-- end -->\nafter\n")
        monkeypatch.setattr(module, "DOCUMENT", document)
        write()
        text = document.read_text()
        assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
        return text

    return report
