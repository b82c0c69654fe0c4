"""Tables of the results of `cpu_stack.py`, in the terminal, in README.md and in docs/from-llama-cpp.md.

If a case was measured repeatedly, the newest counts. In a document, a table is between
`<!-- cpu_stack: MODEL TOKENS,... CACHE;... -->` and `<!-- end -->`. With ` steps` after the caches, it omits prompts
and peaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import markdown

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "from-llama-cpp.md")
BLOCK = re.compile(r"(<!-- cpu_stack: (\S+) (\S+) (\S+)( steps)? -->\n).*?(<!-- end -->)", re.DOTALL)
CASE = ("device", "threads", "model", "tokens", "stack", "weights", "cache")
HEADER = ("stack", "weights", "cache", "tokens", "ms per token", "least", "deviation", "prompt, s", "peak, MB")
HEADER += ("loading, MB", "cache, MB")


def read(path: Path) -> list[dict[str, Any]]:
    """Results in a file, the newest of each case; empty if there is no file."""
    newest: dict[tuple, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        row = json.loads(line)
        newest[tuple(row[key] for key in CASE)] = row
    return list(newest.values())


def measured(path: Path, commit: str) -> set[tuple]:
    """Cases that a file contains for a commit: model, tokens, threads, stack, cache and weights."""
    return {
        (row["model"], row["tokens"], row["threads"], row["stack"], row["cache"], row["asked"])
        for row in read(path)
        if row["commit"].removesuffix("-dirty") == commit.removesuffix("-dirty")
    }


def kind(row: dict[str, Any]) -> tuple[str, str, str]:
    """Stack, weights and cache of a result."""
    return row["stack"], row["weights"], row["cache"]


def megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.0f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Every result, in a table for each model on each machine."""
    parts = []
    for device, threads, model in dict.fromkeys((row["device"], row["threads"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["device"], row["threads"], row["model"]) == (device, threads, model)]
        kinds = list(dict.fromkeys(map(kind, mine)))
        lines = [
            [*kind(row), f"{row['tokens']:,}"]
            + [f"{row[key]:.1f}" for key in ("step_ms", "step_min_ms", "step_deviation_ms", "prompt_seconds")]
            + [megabytes(row[key]) for key in ("peak_bytes", "loading_peak_bytes", "cache_bytes")]
            for row in sorted(mine, key=lambda row: (kinds.index(kind(row)), row["tokens"]))
        ]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in mine))
        parts.append(f"{model}, {threads} threads of {device}, commit {commits}\n\n{markdown(HEADER, lines)}")
    return "\n\n".join(parts) or "nothing was measured"


def overview(
    rows: list[dict[str, Any]], model: str, tokens: Sequence[int], caches: Sequence[str], steps_alone: bool = False
) -> str:
    """Returns a line for each stack with the milliseconds per token at each length.

    Prompt and peak are for the longest length at which all stacks were measured; `steps_alone` omits them.
    """
    mine = [row for row in rows if row["model"] == model and row["cache"] in caches and row["tokens"] in tokens]
    kinds = dict.fromkeys(map(kind, mine))
    common = [count for count in tokens if kinds.keys() == {kind(row) for row in mine if row["tokens"] == count}]
    compared = common[-1] if common else tokens[-1]
    longest = f"{compared:,}"
    header = ["weights, cache", *(f"{count:,}" for count in tokens)]
    header += [] if steps_alone else [f"prompt of {longest}, s", f"peak at {longest}, MB"]
    lines = []
    for stack, weights, cache in kinds:
        by_length = {row["tokens"]: row for row in mine if kind(row) == (stack, weights, cache)}
        steps = [f"{by_length[count]['step_ms']:.0f}" if count in by_length else "-" for count in tokens]
        last = by_length.get(compared)
        ends = ["-", "-"] if last is None else [f"{last['prompt_seconds']:.0f}", megabytes(last["peak_bytes"])]
        lines.append([f"{weights}, {cache}", *steps, *([] if steps_alone else ends)])
    return markdown(header, lines)


def filled(text: str, rows: list[dict[str, Any]]) -> str:
    """`text` with all tables regenerated."""

    def made(match: re.Match) -> str:
        tokens = [int(count) for count in match[3].split(",")]
        return f"{match[1]}{overview(rows, match[2], tokens, match[4].split(';'), match[5] is not None)}\n{match[6]}"

    return BLOCK.sub(made, text)


def document(path: Path) -> None:
    """Inserts the tables of a file's results into the documents."""
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(), read(path)))
