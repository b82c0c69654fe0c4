"""The table of the results of `soak.py`; the newest run counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tables import markdown

DOCUMENT = Path(__file__).parent.parent / "docs" / "notes" / "serving.md"
BLOCK = re.compile(r"(<!-- soak -->\n).*?(<!-- end -->)", re.DOTALL)


def newest(path: Path) -> dict:
    """The newest run. Raises `SystemExit` if there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines:
        raise SystemExit(f"{path} holds no results; run benchmarks/soak.py first.")
    return json.loads(lines[-1])


def text_of(row: dict) -> str:
    """A sentence about the machine, and the table."""
    threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
    machine = (
        f"Measured on {row['device']}, {threads}, float32, torch {row['torch']}, transformers {row['transformers']}, "
        f"commit {row['commit']}."
    )

    def seconds(name: str) -> str:
        return " / ".join(f"{value:.2f}" for value in row[name])

    def counts(name: str) -> str:
        return ", ".join(f"{value:,} {key}" for key, value in sorted(row[name].items(), key=lambda item: -item[1]))

    lines = [
        ("requests, in seconds", f"{row['sent']:,} in {row['seconds']:,.0f}"),
        ("kinds", counts("kinds")),
        ("statuses", counts("statuses")),
        ("tokens of prompts computed, and reused from prefixes", f"{row['prompt_tokens']:,}, {row['reused_tokens']:,}"),
        ("prefixes found in", counts("hits")),
        ("tokens handed out", f"{row['generated_tokens']:,}"),
        ("greedy answers compared with `generate()`", f"{row['compared']:,}"),
        ("of them ended early by the restart, with their last event", f"{row['cut']:,}"),
        ("seconds to the first token: median / 95 % / 99 % / most", seconds("first_token")),
        ("seconds to the whole answer", seconds("whole")),
        ("MB of the budget held at most, of", f"{row['peak_bytes'] / 1e6:.1f} of {row['max_bytes'] / 1e6:.1f}"),
        ("MB of each process after a third of its time, at the end, at most", _memory(row["memory"])),
        ("lost, different, without an end, or otherwise wrong", f"{row['wrong']:,}"),
    ]
    return f"{machine}\n\n{markdown(('', ''), lines)}"


def _memory(found: list[dict]) -> str:
    return "; ".join(" / ".join(f"{value:,.0f}" for value in each.values()) for each in found)


def report(path: Path) -> None:
    """Prints the table."""
    print(f"\n{text_of(newest(path))}")


def document(path: Path) -> None:
    """Inserts it into docs/notes/serving.md."""
    text = text_of(newest(path))
    DOCUMENT.write_text(BLOCK.sub(lambda match: f"{match[1]}{text}\n{match[2]}", DOCUMENT.read_text()))
