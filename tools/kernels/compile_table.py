"""Tables of compiled kernels' resources, with several Triton releases side by side.

    python -m tools.kernels.report --json > FILE        once per release
    python tools/kernels/compile_table.py FILE... > benchmarks/results/compile_kernels.md
    python tools/kernels/compile_table.py --summary FILE...

The summary has one line per kernel and target, with the maximum over all variants.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIELDS = ("registers", "spills", "shared", "instructions", "per element")
SUMMARY_FIELDS = ("registers", "spills", "shared")

Rows = dict[tuple[str, str], dict[str, dict[str, Any]]]


def read(files: Sequence[Path]) -> tuple[list[str], Rows]:
    """Releases in order and, for each (kernel, target), the resources it needs by release."""
    rows: Rows = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rows.setdefault((row["name"], row["target"]), {})[row["triton"]] = row
    releases = sorted({release for row in rows.values() for release in row}, key=_natural)
    return releases, rows


def full_table(releases: Sequence[str], rows: Rows) -> str:
    """A line per variant and target."""
    lines = _head(["kernel", "target"], releases, FIELDS)
    for key in sorted(rows, key=lambda key: _natural(" ".join(key))):
        cells = [cell for release in releases for cell in _cells(rows[key].get(release))]
        lines.append(_line([*key, *cells]))
    return "\n".join(lines)


def summary_table(releases: Sequence[str], rows: Rows) -> str:
    """A line per kernel and target; variants are counted by release."""
    found: dict[tuple[str, str], list[dict[str, dict[str, Any]]]] = {}
    for (name, target), row in rows.items():
        found.setdefault((name.split("-")[0], target), []).append(row)
    lines = _head(["kernel", "target", "variants"], releases, SUMMARY_FIELDS)
    for key in sorted(found):
        compiled = [[row[release] for row in found[key] if release in row] for release in releases]
        cells = [max((row[field] for row in part), default="") for part in compiled for field in SUMMARY_FIELDS]
        lines.append(_line([*key, "/".join(str(len(part)) for part in compiled), *cells]))
    return "\n".join(lines)


def _head(names: Sequence[str], releases: Sequence[str], fields: Sequence[str]) -> list[str]:
    cells = [*names]
    for release in releases:
        cells += [f"{release}: {fields[0]}", *fields[1:]]
    return [_line(cells), "|" + "---|" * len(cells)]


def _cells(row: dict[str, Any] | None) -> list[object]:
    if row is None or row["error"]:
        return ["" if row is None else "failed", "", "", "", ""]
    ratio = " / ".join(f"{number:.2f}" for number in row["per_element"])
    return [row["registers"], row["spills"], row["shared"], row["instructions"] or "", ratio]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers within a text by value."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of `python -m tools.kernels.report --json`")
    parser.add_argument("--summary", action="store_true", help="one line per kernel and target")
    parser.add_argument("--note", default="", help="a paragraph above the table")
    options = parser.parse_args()
    releases, rows = read(options.files)
    if options.summary:
        print(summary_table(releases, rows))
        return
    print(
        f"""# Kernel variants, compiled ahead of time

`make compile-kernels` with Triton {", ".join(releases)} (`tools/kernels/compile_table.py`). Registers are per thread
(AMD: vector registers), shared memory in bytes per program; AMD code is not disassembled. "Per element" is as in
`docs/kernels.md`: instructions of a decode loop per dequantised element, high / low.
"""
    )
    if options.note:
        print(f"{options.note}\n")
    print(full_table(releases, rows))


if __name__ == "__main__":
    main()
