"""Shared by the benchmark tests: loads their scripts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import hf_diffkv_evaluation.methods  # noqa: F401
import pytest
import torch
from evaluated import gemma, invented, llama, names, tokenizer, uncompiled_quanto  # noqa: F401

from hf_diffkv.evaluation.methods import METHODS

FOLDER = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def loading() -> Iterator[Callable[[str], ModuleType]]:
    """Yields a function that imports a script; afterwards, forgets the imports and the methods they registered."""
    METHODS.names()
    threads, path, known = torch.get_num_threads(), list(sys.path), dict(METHODS._entries)
    sys.path[:0] = [str(FOLDER), str(FOLDER / "quality")]
    yield importlib.import_module
    sys.path[:] = path
    # scripts set their own
    torch.set_num_threads(threads)
    METHODS._entries = known
    for file in FOLDER.rglob("*.py"):
        for name in (file.stem, file.parent.name, f"{file.parent.name}.{file.stem}"):
            sys.modules.pop(name, None)


@pytest.fixture
def script() -> Iterator[Callable[[str], ModuleType]]:
    with loading() as load:
        yield load


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    """The script `peers.py`, with its methods registered meanwhile."""
    with loading() as load:
        yield load("peers")


@pytest.fixture(scope="module")
def isolated(peers: ModuleType) -> ModuleType:
    """The module whose environments the methods of `peers` have."""
    return sys.modules["isolated"]


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, Callable], str]:
    """Function that makes a script write its report between a document's marks, and returns the document's text."""

    def report(module: ModuleType, mark: str, write: Callable[[], None]) -> str:
        document = tmp_path / "document.md"
        document.write_text(f"before\n<!-- {mark} -->\nold\n<!-- end -->\nafter\n")
        monkeypatch.setattr(module, "DOCUMENT", document)
        write()
        text = document.read_text()
        assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
        return text

    return report
