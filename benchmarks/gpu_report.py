"""Results from a GPU as Markdown for a pull request: `python benchmarks/gpu_report.py`.

The report has the device, versions, the outcome of the kernel tests, and the median, deviation, speed-up and equality
of each attention, from the JSON lines of `gpu_first_run.py`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tables import FOLDER, markdown, measured, read

VERSIONS = ("driver", "cuda", "torch", "triton", "transformers", "hf_diffkv", "commit")
# a normal distribution's quartiles are this many standard deviations apart
QUARTILES = 1.349


def report(results: Path) -> str:
    """Returns a report on the newest run of each device in a folder of results."""
    path = results / "attention_gpu.jsonl"
    rows = [row for row in read(path) if row["kind"] in ("dense", "compressed")] if path.is_file() else []
    parts = [_of_device(device, rows) for device in dict.fromkeys(row["device"] for row in rows)]
    return "\n\n".join([*parts, _tests(results / "tests_gpu.jsonl")])


def _of_device(device: str, rows: list[dict]) -> str:
    mine = [row for row in rows if row["device"] == device]
    newest = mine[-1]
    about = ", ".join(f"{name} {newest[name]}" for name in VERSIONS if newest.get(name))
    lines = []
    for row in measured(mine):
        lower, upper = row["us_quartiles"]
        deviation = f"{100 * (upper - lower) / QUARTILES / row['us']:.1f} %"
        case = (row["model"], row["batch"], row["context"], row["name"])
        lines.append((*case, row["us"], deviation, row.get("speed_up"), f"{row['error']:.1g}"))
    failed = [f"- {row['name']}: {row.get('failed', row.get('left_out'))}" for row in mine if row not in measured(mine)]
    header = ("model", "batch", "context", "attention", "median us", "deviation", "speed-up", "error to float32")
    return "\n\n".join([f"### {device}", about, markdown(header, lines), *(["\n".join(failed)] if failed else [])])


def _tests(path: Path) -> str:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    # a repeated test counts once
    newest = {row["test"]: row["outcome"] for row in rows}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(newest.values()).items()))
    return f"Tests on the GPU, which compare kernels with PyTorch: {counts or 'none ran'}."


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON lines")
    print(report(options.parse_args(arguments).results))


if __name__ == "__main__":
    main()
