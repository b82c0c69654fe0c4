"""The tensor-parallel example of docs/distributed.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import ROOT, torchrun


@pytest.mark.slow
def test_tensor_parallel_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.DOTALL)
    script = tmp_path / "this_file.py"
    script.write_text(code)
    monkeypatch.chdir(ROOT)
    lines = torchrun(2, script).splitlines()
    answer = lines.index("9082")
    assert "MB dense" in lines[answer + 1]
