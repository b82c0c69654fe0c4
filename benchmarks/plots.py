"""Plots as PNG from the results of the benchmarks, one file for each; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def attention(rows: list[dict], folder: Path) -> Path | None:
    """Speed-up over context: a row of panels per model, a panel per batch."""
    found = [r for r in rows if r["kind"] == "compressed" and "speed_up" in r]
    models = sorted({r["model"] for r in found})
    batches = sorted({r["batch"] for r in found})
    if not found:
        return None
    figure, axes = _subplots(len(models), len(batches))
    for panels, model in zip(axes, models):
        for axis, batch in zip(panels, batches):
            _lines(
                axis, [r for r in found if (r["model"], r["batch"]) == (model, batch)], "name", "context", "speed_up"
            )
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set(title=f"{model}, batch {batch}", xlabel="context", xscale="log")
        panels[0].set_ylabel("speed-up over the best dense attention")
    return _save(figure, axes[0][0], folder / "attention_gpu.png")


def memory_manager(rows: list[dict], folder: Path) -> Path | None:
    """Time of a round over the batch, on the device and on the CPU (Fig. 13)."""
    device = [{**r, "side": r["device"], "shown": r["compaction_us"]} for r in rows if r["kind"] == "device"]
    host = [{**r, "side": f"CPU, {r['threads']} threads", "shown": r["us"]} for r in rows if r["kind"] == "cpu"]
    if not device:
        return None
    figure, axes = _subplots(1, 1)
    _lines(axes[0][0], device + host, "side", "batch", "shown")
    axes[0][0].set(xlabel="batch", ylabel="us per compaction", yscale="log")
    return _save(figure, axes[0][0], folder / "memory_manager_gpu.png")


def prompt(rows: list[dict], folder: Path) -> Path | None:
    """Prompt attention with significance over flash attention alone."""
    found = [r for r in rows if r["kind"] == "significance" and "over_flash" in r]
    models = sorted({r["model"] for r in found})
    if not found:
        return None
    figure, axes = _subplots(1, len(models))
    for axis, model in zip(axes[0], models):
        _lines(axis, [r for r in found if r["model"] == model], "name", "context", "over_flash")
        axis.set(title=model, xlabel="context", xscale="log", ylim=(0.9, None))
    axes[0][0].set_ylabel("time over flash attention's")
    return _save(figure, axes[0][0], folder / "prompt_gpu.png")


def decode(rows: list[dict], folder: Path) -> Path | None:
    """Time per token over context."""
    found = [r for r in rows if r["kind"] == "length"]
    if not found:
        return None
    figure, axes = _subplots(1, 1, width=6)
    _lines(axes[0][0], found, "cache", "context", "ms_per_token")
    axes[0][0].set(xlabel="context", ylabel="ms per token", ylim=(0, None))
    return _save(figure, axes[0][0], folder / "decode_gpu.png")


def decode_cpu(rows: list[dict], path: Path) -> Path:
    """Time per token over context at batch 1, all caches: a row of panels per number of threads, a panel per model."""
    found = [{**r, "shown": r["ms"][1]} for r in rows if r["batch"] == 1]
    models, threads = sorted({r["model"] for r in found}), sorted({r["threads"] for r in found})
    figure, axes = _subplots(len(threads), len(models), width=5, sharey=False)
    for panels, count in zip(axes, threads):
        for axis, model in zip(panels, models):
            members = [r for r in found if (r["model"], r["threads"]) == (model, count)]
            _lines(axis, members, "cache", "context", "shown")
            axis.set(title=f"{model}, {count} thread{'s' * (count > 1)}", xlabel="context", ylim=(0, None))
        panels[0].set_ylabel("ms per token")
    return _save(figure, axes[0][-1], path, loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def bytes_cpu(rows: list[dict], path: Path) -> Path:
    """Megabytes held over context at batch 1, all caches, a panel per model."""
    threads = min(r["threads"] for r in rows)
    found = [{**r, "mb": r["cache_bytes"] / 1e6} for r in rows if r["batch"] == 1 and r["threads"] == threads]
    models = sorted({r["model"] for r in found})
    figure, (panels,) = _subplots(1, len(models), width=5, sharey=False)
    for axis, model in zip(panels, models):
        _lines(axis, [r for r in found if r["model"] == model], "cache", "context", "mb")
        axis.set(title=model, xlabel="context", ylim=(0, None))
    panels[0].set_ylabel("megabytes")
    return _save(figure, panels[-1], path, loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


PLOTS: dict[str, Callable[[list[dict], Path], Path | None]] = {
    "attention_gpu": attention,
    "memory_manager_gpu": memory_manager,
    "prompt_gpu": prompt,
    "decode_gpu": decode,
}


def _subplots(rows: int, columns: int, width: float = 4, sharey: bool = True) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width * columns, 3.5 * rows), squeeze=False, sharey=sharey)


def _lines(axis: Any, rows: list[dict], label: str, x: str, y: str) -> None:
    for name in sorted({r[label] for r in rows}):
        points = sorted((r[x], r[y]) for r in rows if r[label] == name)
        axis.plot(*zip(*points), marker="o", markersize=3, label=name)


def _save(figure: Any, with_legend: Any, path: Path, **legend: Any) -> Path:
    with_legend.legend(**legend)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path
