"""Markdown tables from the output of `long_text.py` and `tool_calls.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from field_tasks.tables import markdown

from hf_diffkv.evaluation.statistics import estimate

RESULTS = Path(__file__).resolve().parents[1] / "results"


def long_text_table(name: str) -> str:
    """Formats a row for each length and method."""
    lines = [["tokens", "perplexity", "method", "real bytes", "KL", "KL, 99.9 %", "the same first choice"]]
    lines.append(["---"] * len(lines[0]))
    for row in _rows(RESULTS / "long_text" / f"{name}.json"):
        figures = [f"{row[figure]:.4f}" for figure in ("kl", "kl_99.9%")]
        about = [f"{row['length']:,}", f"{row['perplexity']:.1f}", f"`{row['method']}`"]
        lines.append([*about, f"{row['bytes'] / row['dense_bytes']:.1%}", *figures, f"{row['same']:.1%}"])
    return markdown(lines)


def tool_calls_table(name: str) -> str:
    """Formats a row for each method, with the mean KL over the calls' tokens."""
    rows = _rows(RESULTS / "tool_calls" / f"{name}.json")
    head = ["method", "real bytes", "KL (95 %)", "the same first choice", "calls with all choices the same"]
    lines = [head, ["---"] * len(head)]
    for method in dict.fromkeys(row["method"] for row in rows):
        calls = [row for row in rows if row["method"] == method]
        ratio = sum(row["bytes"] for row in calls) / sum(row["dense_bytes"] for row in calls)
        kl = estimate([(row["kl"] * row["tokens"], row["tokens"]) for row in calls])
        same = sum(row["same"] * row["tokens"] for row in calls) / sum(row["tokens"] for row in calls)
        whole = sum(row["same"] == 1.0 for row in calls)
        interval = f"{kl.mean:.4f} ({kl.low:.4f} to {kl.high:.4f})"
        lines.append([f"`{method}`", f"{ratio:.1%}", interval, f"{same:.1%}", f"{whole} of {len(calls)}"])
    return markdown(lines)


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]
