"""Tests the tables of compiled kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "tools" / "kernels" / "compile_table.py"


def row(triton: str, name: str, registers: int, **more: Any) -> str:
    found = {"spills": 0, "stack": 0, "shared": 64, "instructions": 500, "per_element": [], "error": "", **more}
    return json.dumps({"triton": triton, "name": name, "target": "sm_90", "registers": registers, **found})


def tables(folder: Path, *options: str) -> list[list[str]]:
    (folder / "old").write_text(row("3.9.0", "attend-d128", 40, per_element=[2.5, 2.25]) + "\n")
    new = [
        row("3.10.1", "attend-d64", 50, spills=8),
        row("3.10.1", "attend-d128", 30),
        row("3.10.1", "b", 9, error="no"),
    ]
    (folder / "new").write_text("\n".join(new))
    command = [sys.executable, str(SCRIPT), str(folder / "new"), str(folder / "old"), *options]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_releases_stand_side_by_side(tmp_path: Path) -> None:
    head, _, *lines = tables(tmp_path)
    assert head[2] == "3.9.0: registers" and head[7] == "3.10.1: registers"
    assert lines == [
        ["attend-d64", "sm_90", "", "", "", "", "", "50", "8", "64", "500", ""],
        ["attend-d128", "sm_90", "40", "0", "64", "500", "2.50 / 2.25", "30", "0", "64", "500", ""],
        ["b", "sm_90", "", "", "", "", "", "failed", "", "", "", ""],
    ]


def test_the_summary_takes_the_most(tmp_path: Path) -> None:
    lines = tables(tmp_path, "--summary")[2:]
    assert lines[0] == ["attend", "sm_90", "1/2", "40", "0", "64", "50", "8", "64"]
