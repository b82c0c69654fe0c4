"""examples/quick_start.ipynb runs from top to bottom in a kernel of its own, offline, and is kept without outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quick_start.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert printed.startswith("9082\n") and "dense" in printed
    shown = [kind for output in outputs if output.output_type == "execute_result" for kind in output.data]
    assert shown.count("image/png") == 4 and shown.count("text/html") == 2
