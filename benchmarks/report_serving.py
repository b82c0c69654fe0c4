"""Tables of the results of `serving.py`; if a case was measured repeatedly, the newest counts."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from tables import markdown

DOCUMENT = Path(__file__).parent.parent / "docs" / "notes" / "serving.md"
BLOCK = re.compile(r"(<!-- serving -->\n).*?(<!-- end -->)", re.DOTALL)
CASE = ("device", "dtype", "threads", "kind", "model", "case", "engine", "prompt")


def read(path: Path) -> list[dict]:
    newest: dict[tuple, dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        row.setdefault("case", row["model"])
        newest[tuple(str(row.get(key)) for key in CASE)] = row
    return list(newest.values())


def requests(rows: list[dict]) -> str:
    """A line for each engine, compared with the first engine of the same model."""
    header = ("model", "prompts, tokens", "budget MB", "engine", "in flight, most", "of Transformers'", "mean")
    header += (
        "tokens per second",
        "of Transformers'",
        "per second of the processor",
        "of Transformers'",
        "MB held at most",
    )
    lines = []
    first: dict[tuple, dict] = {}
    for row in rows:
        base = first.setdefault((row["device"], row["dtype"], row["threads"], row["case"]), row)
        low, median, high = row["prompt_tokens"]
        line = [row["model"], f"{low}-{high}, median {median}", row["max_bytes"] / 1e6, row["engine"]]
        line += [row["most"], row["most"] / base["most"], row["mean"], row["tokens_per_second"]]
        line += [row["tokens_per_second"] / base["tokens_per_second"], *_worked(row, base), row["bytes"] / 1e6]
        lines.append(line)
    return markdown(header, lines)


def _worked(row: dict, base: dict) -> list:
    """Tokens per second of processor time, which other load changes less, and relative to `base`."""
    if "processor_seconds" not in row or "processor_seconds" not in base:
        return ["", ""]
    rate, other = (one["new_tokens"] / one["processor_seconds"] for one in (row, base))
    return [rate, rate / other]


def first_tokens(rows: list[dict]) -> str:
    """Medians, minima and maxima."""
    header = ("model", "prompt, tokens", "engine", "seconds to the first token", "of Transformers'")
    lines = []
    first: dict[tuple, float] = {}
    for row in rows:
        median = statistics.median(row["seconds"])
        base = first.setdefault((row["device"], row["dtype"], row["threads"], row["model"], row["prompt"]), median)
        shown = f"{median:.3g} ({row['seconds'][0]:.3g}-{row['seconds'][-1]:.3g})"
        lines.append([row["model"], row["prompt"], row["engine"], shown, median / base])
    return markdown(header, lines)


def tables(rows: list[dict]) -> str:
    parts = []
    for kind, table in (("serving", requests), ("first token", first_tokens)):
        found = [row for row in rows if row["kind"] == kind]
        if found:
            parts.append(table(found))
    return "\n\n".join(parts)


def machine(rows: list[dict]) -> str:
    """Names the device, software and commits of the rows in a sentence."""
    row = rows[-1]
    runs = dict.fromkeys(f"{one['commit']} ({one['threads']} thread{'s' * (one['threads'] > 1)})" for one in rows)
    return (
        f"Measured on {row['device']}, {row['dtype']}, torch {row['torch']}, transformers {row['transformers']}, "
        f"commits {', '.join(runs)}."
    )


def report(path: Path) -> None:
    """Prints the tables."""
    rows = read(path) if path.is_file() else []
    if not rows:
        raise SystemExit(f"{path} holds no results; run benchmarks/serving.py first.")
    print(f"\n{machine(rows)}\n\n{tables(rows)}")


def document(path: Path) -> None:
    """Inserts the tables into docs/notes/serving.md."""
    rows = read(path)
    text = f"{machine(rows)}\n\n{tables(rows)}"
    DOCUMENT.write_text(BLOCK.sub(lambda match: f"{match[1]}{text}\n{match[2]}", DOCUMENT.read_text()))
