"""Tables, slopes and a plot of the results of `decode_cpu.py`; if a case was measured repeatedly, the newest counts."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import plots
from tables import markdown

ROOT = Path(__file__).parent.parent
# columns of the table in docs/performance.md
SHOWN = ("DynamicCache", "StaticCache", "QuantizedCache quanto 4 bit", "QuantizedCache hqq 4 bit")
SHOWN += ("DiffKV quality", "DiffKV balanced", "DiffKV small")
BLOCK = re.compile(r"(<!-- decode_cpu -->\n).*?(<!-- end -->)", re.DOTALL)
CASE = ("device", "dtype", "model", "layers", "batch", "threads", "context", "cache")


def read(path: Path) -> list[dict]:
    """Reads the rows of decode steps; lines in other formats are skipped."""
    newest: dict[tuple, dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("kind") == "step":
            newest[tuple(row[key] for key in CASE)] = row
    return list(newest.values())


def groups(rows: Iterable[dict], keys: tuple[str, ...]) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def steps(rows: list[dict]) -> str:
    """Tabulates all cases: medians, their quartiles, and ratios to DynamicCache and StaticCache."""
    header = ("model", "threads", "batch", "context", "cache", "ms per token (quartiles)", "of DynamicCache")
    header += ("of StaticCache", "attention ms (quartiles)", "of DynamicCache", "MB")
    lines = []
    for case, members in groups(rows, ("device", "dtype", *header[:4])).items():
        by_name = {row["cache"]: row for row in members}

        def ratio(row: dict, name: str, field: str, by_name: dict[str, dict] = by_name) -> float | None:
            return row[field][1] / by_name[name][field][1] if name in by_name else None

        for row in members:
            line = [*case[2:], row["cache"], _spread(row["ms"])]
            line += [ratio(row, name, "ms") for name in ("DynamicCache", "StaticCache")]
            lines.append([*line, _spread(row["attention_ms"]), ratio(row, "DynamicCache", "attention_ms")])
            lines[-1].append(row["cache_bytes"] / 1e6)
    return markdown(header, lines)


def slopes(rows: list[dict]) -> str:
    """Tabulates the cost of one more token of context, from a line fitted to the medians at batch 1."""
    header = ("model", "threads", "cache", "us per 1,000 tokens of context", "ms at 0", "attention: us per 1,000")
    lines = []
    alone = [row for row in rows if row["batch"] == 1]
    for case, members in groups(alone, ("device", "dtype", *header[:3])).items():
        if len(members) < 2:
            continue
        contexts = [row["context"] for row in members]
        whole, attention = (
            statistics.linear_regression(contexts, [row[field][1] for row in members])
            for field in ("ms", "attention_ms")
        )
        lines.append([*case[2:], 1e6 * whole.slope, whole.intercept, 1e6 * attention.slope])
    return markdown(header, lines)


def overview(rows: list[dict]) -> str:
    """Returns a line for each context, with the single-thread median of a whole step and a column for each of `SHOWN`.

    Models too small for practical use are left out.
    """
    lines = []
    shown = [row for row in rows if row["threads"] == 1 and row["model"] != "tiny-lm"]
    cases = groups(shown, ("model", "batch", "context"))
    for case, members in sorted(cases.items()):
        medians = {row["cache"]: f"{row['ms'][1]:.3g}" for row in members}
        lines.append([*case, *(medians.get(name, "-") for name in SHOWN)])
    return markdown(("model", "requests", "context", *SHOWN), lines)


def document(path: Path) -> None:
    """Puts the overview into docs/performance.md and the plots into docs/."""
    page = ROOT / "docs" / "performance.md"
    table = overview(read(path))
    page.write_text(BLOCK.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page.read_text()))
    for name in (f"{path.stem}.png", f"{path.stem}-bytes.png"):
        (ROOT / "docs" / name).write_bytes(path.with_name(name).read_bytes())


def report(path: Path) -> None:
    """Prints the tables, and draws the plot next to the results if matplotlib is installed."""
    rows = read(path)
    if not rows:
        raise SystemExit(f"{path} holds no decode steps; run benchmarks/decode_cpu.py first.")
    print(steps(rows), slopes(rows), sep="\n\n")
    try:
        for draw, suffix in ((plots.decode_cpu, ".png"), (plots.bytes_cpu, "-bytes.png")):
            shown = [row for row in rows if row["cache"] in SHOWN]
            print(f"\nplot: {draw(shown, path.with_name(path.stem + suffix))}")
    except ImportError:
        print("\nno plot: matplotlib is not installed")


def _spread(quartiles: list[float]) -> str:
    lower, median, upper = (f"{value:.3g}" for value in quartiles)
    return f"{median} ({lower}-{upper})"
