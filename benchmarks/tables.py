"""Tables in Markdown and plots as PNG from the JSON lines of the GPU benchmarks: `python benchmarks/tables.py`.

Of repeated measurements of one case on one device the newest counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def read(path: Path) -> list[dict]:
    """Results of one file; later ones replace earlier ones of the same case."""
    newest: dict[tuple, dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "failed" in row or row.get("kind") == "check":
            continue
        keys = ("device", "kind", "model", "dtype", "name", "cache", "batch", "context", "layers")
        newest[tuple(str(row.get(key)) for key in keys)] = row
    return list(newest.values())


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table; None becomes an empty cell, floats keep three digits."""

    def cell(value: object) -> str:
        return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    rows = ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *rows])


def attention(rows: list[dict]) -> str:
    """One line per case: what each precision reaches, against the fastest dense way."""
    header = ("model", "batch", "context", "name", "us", "GB/s", "of peak", "speed-up", "scores, of attention", "error")
    order = sorted(rows, key=lambda r: (r["model"], r["batch"], r["context"], r["kind"], -r["us"]))
    lines = []
    for row in order:
        parts = [row.get(f"{part}_us") for part in ("attend", "merge", "score")]
        share = parts[2] / sum(parts) if None not in parts and sum(parts) else None
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
                share,
                row["error"],
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
    header = ("model", "context", "new tokens", "name", "us", "of the best dense", "TFLOP/s")
    order = sorted(rows, key=lambda r: (r["model"], r["context"], r.get("new_tokens", 0), r["kind"]))
    names = ("model", "context", "new_tokens", "name", "us", "over_dense", "tflops")
    return markdown(header, ([r.get(name) for name in names] for r in order))


def decode(rows: list[dict]) -> str:
    """Time per token by length, its line, and tokens per second within a memory budget."""
    lengths = sorted((r for r in rows if r["kind"] == "length"), key=lambda r: (r["context"], r["cache"]))
    first = markdown(
        ("context", "cache", "ms per token", "attention", "compaction", "bytes of dense"),
        (
            (
                r["context"],
                r["cache"],
                r["ms_per_token"],
                r.get("attention_share"),
                r.get("compaction_share"),
                r.get("ratio"),
            )
            for r in lengths
        ),
    )
    second = markdown(
        ("cache", "us per 1,000 tokens of context", "intercept ms", "faster from this length on"),
        (
            (
                r["cache"],
                r["slope_us_per_1k"],
                r["intercept_ms"],
                "; ".join(f"{other}: {length}" for other, length in r.get("break_even", {}).items()),
            )
            for r in rows
            if r["kind"] == "line"
        ),
    )
    budget = (r for r in rows if r["kind"] == "budget")
    third = markdown(
        ("cache", "context", "cache bytes allowed", "batch", "ms per token", "tokens per second"),
        (
            (r["cache"], r["context"], r["cache_bytes_allowed"], r["batch"], r["ms_per_token"], r["tokens_per_second"])
            for r in budget
        ),
    )
    return "\n\n".join((first, second, third))


def plot_attention(rows: list[dict], folder: Path) -> list[Path]:
    """Speed-up over context, one panel per batch, one file per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    found = [r for r in rows if r["kind"] == "compressed" and "speed_up" in r]
    for model in sorted({r["model"] for r in found}):
        mine = [r for r in found if r["model"] == model]
        batches = sorted({r["batch"] for r in mine})
        figure, axes = plt.subplots(1, len(batches), figsize=(4 * len(batches), 3.5), squeeze=False, sharey=True)
        for axis, batch in zip(axes[0], batches):
            lines(axis, [r for r in mine if r["batch"] == batch], "name", "speed_up")
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set(title=f"batch {batch}", xlabel="context", xscale="log")
        axes[0][0].set_ylabel("speed-up over the best dense attention")
        axes[0][0].legend()
        made.append(save(figure, folder / f"attention_gpu-{model}.png"))
    return made


def plot_decode(rows: list[dict], folder: Path) -> list[Path]:
    """Time per token over context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [r for r in rows if r["kind"] == "length"]
    if not found:
        return []
    figure, axis = plt.subplots(figsize=(6, 4))
    lines(axis, found, "cache", "ms_per_token")
    axis.set(xlabel="context", ylabel="ms per token", ylim=(0, None))
    axis.legend()
    return [save(figure, folder / "decode_gpu.png")]


def lines(axis: object, rows: list[dict], label: str, value: str) -> None:
    for name in sorted({r[label] for r in rows}):
        points = sorted((r["context"], r[value]) for r in rows if r[label] == name)
        axis.plot(*zip(*points), marker="o", markersize=3, label=name)


def save(figure: object, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path


TABLES: dict[str, Callable[[list[dict]], str]] = {
    "attention_gpu": attention,
    "memory_manager_gpu": memory_manager,
    "prompt_gpu": prompt,
    "decode_gpu": decode,
}
PLOTS = {"attention_gpu": plot_attention, "decode_gpu": plot_decode}


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON lines")
    options.add_argument("--plots", action="store_true", help="write PNG files beside them (needs matplotlib)")
    args = options.parse_args(arguments)
    for name, table in TABLES.items():
        path = args.results / f"{name}.jsonl"
        if not path.is_file():
            continue
        rows = read(path)
        for device in sorted({r["device"] for r in rows}):
            mine = [r for r in rows if r["device"] == device]
            about = mine[-1]
            print(f"## {name}, {device}\n")
            print(", ".join(f"{key} {about[key]}" for key in ("driver", "torch", "triton", "transformers", "commit")))
            print(f"\n{table(mine)}\n")
            if args.plots and name in PLOTS:
                for made in PLOTS[name](mine, args.results):
                    print(f"plot: {made.name}")


if __name__ == "__main__":
    main()
