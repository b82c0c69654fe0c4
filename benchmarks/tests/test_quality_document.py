"""The tables of README.md, docs/quality.md and docs/notes/quality-studies.md match the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["README.md", "docs/quality.md", "docs/notes/quality-studies.md"])
def test_tables_are_what_the_results_give(script, name: str) -> None:
    document = script("document")
    text = (ROOT / name).read_text()
    blocks = [found for block in document.BLOCKS for found in block.findall(text)]
    assert len(blocks) == text.count("<!-- end -->") - text.count("<!-- cpu_stack: ") > 0
    assert text == document.filled(text), "run `python benchmarks/quality/document.py`"
