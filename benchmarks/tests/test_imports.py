"""Benchmark scripts import one another by bare name, which import-linter does not check."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]


def imported(source: str) -> set[str]:
    """Returns the modules that a script imports, at any depth and including imports for type checking."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_no_circular_imports() -> None:
    scripts = [*FOLDER.glob("*.py"), *(FOLDER / "quality").glob("*.py")]
    sources = {path.stem: path.read_text() for path in scripts}
    graph = {name: imported(source) & sources.keys() for name, source in sources.items()}
    assert sum(map(len, graph.values())) > 20
    # raises CycleError
    TopologicalSorter(graph).prepare()


def test_a_circle_is_found() -> None:
    sources = {"first": "def f():\n    import second", "second": "if TYPE_CHECKING:\n    from first import f"}
    with pytest.raises(CycleError):
        TopologicalSorter({name: imported(source) for name, source in sources.items()}).prepare()
