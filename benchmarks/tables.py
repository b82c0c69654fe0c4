"""Markdown tables, targets met and PNG plots, from the JSON lines of the GPU benchmarks: `python benchmarks/tables.py`.

If a case was measured repeatedly on one device, the newest result counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import targets
from lengths import length_lines
from plots import PLOTS

FOLDER = Path(__file__).parent / "results"
# the keys that identify a case; of two results of one case, the newer counts
KEYS = ("device", "kind", "model", "dtype", "name", "cache", "batch", "context", "new_tokens", "layers")
KEYS += ("cache_bytes_allowed", "block", "num_warps", "num_stages", "maxnreg", "splits")


def read(path: Path) -> list[dict]:
    """Results in one file, the newest of each case, including those that could not be measured."""
    newest: dict[tuple, dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "check" and "failed" not in row:
            continue
        # the batch that fits a budget is a result
        keys = [key for key in KEYS if not (key == "batch" and row["kind"] == "budget")]
        case = tuple(str(row.get(key)) for key in keys)
        newest.pop(case, None)
        newest[case] = row
    return list(newest.values())


def measured(rows: list[dict]) -> list[dict]:
    """Returns the rows of cases that neither failed nor were left out."""
    return [row for row in rows if "failed" not in row and "left_out" not in row]


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table; None becomes an empty cell, and floats keep three digits or the whole integer part."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return "" if value is None else str(value)

    rows = ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *rows])


def attention(rows: list[dict]) -> str:
    """One line per case: results of each precision, against the fastest dense attention; then kernel settings."""
    swept = [row for row in rows if row["kind"] == "sweep"]
    if swept:
        header = (
            "batch",
            "context",
            "name",
            "block",
            "num_warps",
            "num_stages",
            "maxnreg",
            "splits",
            "us",
            "share_of_peak",
        )
        order = sorted(swept, key=lambda r: (r["batch"], r["name"], r["us"]))
        table = markdown(header, ([row.get(name) for name in header] for row in order))
        rest = [row for row in rows if row["kind"] != "sweep"]
        return f"{attention(rest)}\n\n{table}" if rest else table
    header = (
        "model",
        "batch",
        "context",
        "name",
        "us",
        "GB/s",
        "of peak",
        "speed-up",
        "merging and scores, of attention",
        "error",
    )
    order = sorted(rows, key=lambda r: (r["model"], r["batch"], r["context"], r["kind"], -r["us"]))
    lines = []
    for row in order:
        lines.append(
            (
                row["model"],
                row["batch"],
                row["context"],
                row["name"],
                row["us"],
                row["gb_per_s"],
                row.get("share_of_peak"),
                row.get("speed_up"),
                targets.finish_share(row),
                row.get("error"),
            )
        )
    return markdown(header, lines)


def memory_manager(rows: list[dict]) -> str:
    """Compaction of a step on the device and on the CPU."""
    host = {(r["batch"], r["context"], r["layers"]): r for r in rows if r["kind"] == "cpu"}
    header = ("batch", "context", "rows", "compaction us", "of attention", "CPU us", "CPU threads", "CPU / device")
    lines = []
    for row in sorted((r for r in rows if r["kind"] == "device"), key=lambda r: (r["context"], r["batch"])):
        other = host.get((row["batch"], row["context"], row["layers"]), {})
        ratio = other["us"] / row["compaction_us"] if other and row["compaction_us"] else None
        case = (row["batch"], row["context"], row["rows"], row["compaction_us"], row["share_of_attention"])
        lines.append((*case, other.get("us"), other.get("threads"), ratio))
    return markdown(header, lines)


def prompt(rows: list[dict]) -> str:
    """Prompt attention with and without received attention."""
    header = ("model", "context", "new tokens", "name", "us", "of flash", "of the best dense", "TFLOP/s")
    order = sorted(rows, key=lambda r: (r["model"], r.get("new_tokens", 0), r["context"], r["kind"]))
    names = ("model", "context", "new_tokens", "name", "us", "over_flash", "over_dense", "tflops")
    return markdown(header, ([r.get(name) for name in names] for r in order))


def first_token(rows: list[dict]) -> str:
    """Time from a prompt to its first token."""
    header = ("context", "cache", "ms", "mean kernels of a layer", "of the best dense")
    order = sorted(rows, key=lambda r: (r["context"], r["ms"]))
    names = ("context", "cache", "ms", "kernels_per_layer", "over_dense")
    return markdown(header, ([r.get(name) for name in names] for r in order))


def latents(rows: list[dict]) -> str:
    """A step's attention over latents, from the queries to the heads' outputs."""
    order = sorted(rows, key=lambda r: (r["shape"], r["batch"], r["context"], -r["us"]))
    names = ("shape", "batch", "context", "cache", "us", "latent_kernel_us", "finish_kernel_us", "other_us", "error")
    return markdown(names, ([row.get(name) for name in names] for row in order))


def decode(rows: list[dict]) -> str:
    """Time per token by length, the fitted line, and tokens per second within a memory budget."""
    lengths = sorted((r for r in rows if r["kind"] == "length"), key=lambda r: (r["context"], r["cache"]))
    header = ("context", "cache", "ms per token", "mean ms", "attention, of kernels", "compaction us", "of a step")
    header += ("merging and scores, of a step", "bytes of dense", "warnings")
    names = ("context", "cache", "ms_per_token", "ms_mean", "attention_share", "compaction_us", "compaction_share")
    names += ("finish_share",)
    first = markdown(
        header, ([*(r.get(name) for name in names), r.get("ratio"), "; ".join(r.get("warnings", []))] for r in lengths)
    )
    second = markdown(
        ("cache", "us per 1,000 tokens of context", "intercept ms", "faster from this length on"),
        (
            (name, 1e6 * line[0], line[1], "; ".join(f"{other}: {length}" for other, length in ahead.items()))
            for name, line, ahead in length_lines(lengths)
        ),
    )
    header = ("cache", "context", "cache bytes allowed", "batch", "ms per token", "mean ms", "tokens per second")
    names = ("cache", "context", "cache_bytes_allowed", "batch", "ms_per_token", "ms_mean", "tokens_per_second")
    third = markdown(
        (*header, "compaction, of a step", "merging and scores, of a step"),
        (
            [*(r[name] for name in names), r.get("compaction_share"), r.get("finish_share")]
            for r in rows
            if r["kind"] == "budget"
        ),
    )
    return "\n\n".join((first, second, third))


TABLES: dict[str, Callable[[list[dict]], str]] = {
    "attention_gpu": attention,
    "memory_manager_gpu": memory_manager,
    "prompt_gpu": prompt,
    "decode_gpu": decode,
    "ttft_gpu": first_token,
    "latent_gpu": latents,
}


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON lines")
    options.add_argument("--plots", action="store_true", help="write PNG files beside them (needs matplotlib)")
    args = options.parse_args(arguments)
    files = {name: args.results / f"{name}.jsonl" for name in TABLES}
    found = {name: read(path) for name, path in files.items() if path.is_file()}
    for device in sorted({row["device"] for rows in found.values() for row in rows}):
        mine = {name: [row for row in rows if row["device"] == device] for name, rows in found.items()}
        for name, rows in mine.items():
            print_results(name, device, rows, args.results if args.plots else None)
        print(f"## Targets, {device}\n\n{markdown(targets.HEADER, targets.lines(mine))}\n")


def print_rest(rows: list[dict]) -> None:
    """Prints the cases that were not measured, on one line for each reason."""
    reasons: dict[tuple, list[dict]] = {}
    for row in rows:
        alike = (row["kind"], row.get("model"), row.get("name"), row.get("cache"), row.get("left_out") or row["failed"])
        reasons.setdefault(alike, []).append(row)
    for (*_, reason), cases in reasons.items():
        common = [key for key in KEYS if key != "device" and len({str(row.get(key)) for row in cases}) == 1]
        case = ", ".join(f"{key} {cases[0][key]}" for key in common if key in cases[0])
        print(f"- not measured{f' ({len(cases)} cases)' if len(cases) > 1 else ''}: {case}: {reason}")


def print_results(name: str, device: str, rows: list[dict], plots: Path | None) -> None:
    """Prints one benchmark's table, what it left out, and its plot."""
    good = measured(rows)
    if good:
        about = ", ".join(f"{key} {good[-1][key]}" for key in ("driver", "torch", "triton", "transformers"))
        about += ", commit " + " and ".join(dict.fromkeys(row["commit"] for row in good))
        print(f"## {name}, {device}\n\n{about}\n\n{TABLES[name](good)}\n")
    print_rest([row for row in rows if row not in good])
    if plots is None or not good:
        return
    try:
        made = PLOTS[name](good, plots)
    except ImportError as error:
        print(f"no plot: {error}")
        return
    print("" if made is None else f"\nplot: {made.name}\n")


if __name__ == "__main__":
    main()
