"""Plots of the benchmark results, one PNG file each; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hf_diffkv_evaluation import lines


def attention(rows: list[dict], folder: Path) -> Path | None:
    """Speed-up over context: a row of panels per model, one panel per batch."""
    found = [r for r in rows if r["kind"] == "compressed" and "speed_up" in r]
    batches = sorted({r["batch"] for r in found})
    panels = {
        f"{model}, batch {batch}": _curves(
            [r for r in found if (r["model"], r["batch"]) == (model, batch)], "name", "speed_up"
        )
        for model in sorted({r["model"] for r in found})
        for batch in batches
    }
    ylabel = "speed-up over the best dense attention"
    if not found:
        return None
    picture = lines.curves(panels, ylabel, level=1, columns=len(batches), xscale="log", xlim=(None, None))
    return picture.save(folder / "attention_gpu.png")


def memory_manager(rows: list[dict], folder: Path) -> Path | None:
    """Time of a round over the batch, on the device and on the CPU (Fig. 13)."""
    device = [{**r, "side": r["device"], "shown": r["compaction_us"]} for r in rows if r["kind"] == "device"]
    host = [{**r, "side": f"CPU, {r['threads']} threads", "shown": r["us"]} for r in rows if r["kind"] == "cpu"]
    if not device:
        return None
    curves = _curves(device + host, "side", "shown", x="batch")
    picture = lines.curves(curves, "us per compaction", xlabel="batch", yscale="log", ylim=(None, None))
    return picture.save(folder / "memory_manager_gpu.png")


def prompt(rows: list[dict], folder: Path) -> Path | None:
    """Prompt attention with significance, relative to flash attention alone."""
    found = [r for r in rows if r["kind"] == "significance" and "over_flash" in r]
    panels = _panels(found, "model", "name", "over_flash")
    if not found:
        return None
    picture = lines.curves(panels, "time over flash attention's", xscale="log", xlim=(None, None), ylim=(0.9, None))
    return picture.save(folder / "prompt_gpu.png")


def decode(rows: list[dict], folder: Path) -> Path | None:
    """Time per token over context."""
    found = [r for r in rows if r["kind"] == "length"]
    if not found:
        return None
    return lines.speed(_curves(found, "cache", "ms_per_token")).save(folder / "decode_gpu.png")


def decode_cpu(rows: list[dict], path: Path) -> Path:
    """Time per token over context at batch 1, for all caches: a row of panels per thread count, a panel per model."""
    found = [{**r, "shown": r["ms"][1]} for r in rows if r["batch"] == 1]
    for row in found:
        row["panel"] = f"{row['model']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
    found.sort(key=lambda r: (r["threads"], r["model"]))
    return lines.speed(_panels(found, "panel", "cache", "shown")).save(path)


def bytes_cpu(rows: list[dict], path: Path) -> Path:
    """Bytes held over context at batch 1, for all caches, one panel per model."""
    threads = min(r["threads"] for r in rows)
    found = [r for r in rows if r["batch"] == 1 and r["threads"] == threads]
    return lines.memory(_panels(sorted(found, key=lambda r: r["model"]), "model", "cache", "cache_bytes")).save(path)


PLOTS: dict[str, Callable[[list[dict], Path], Path | None]] = {
    "attention_gpu": attention,
    "memory_manager_gpu": memory_manager,
    "prompt_gpu": prompt,
    "decode_gpu": decode,
    "ttft_gpu": lambda rows, folder: None,
    "latent_gpu": lambda rows, folder: None,
}


def _panels(rows: list[dict], panel: str, label: str, y: str) -> dict[str, dict]:
    """Curves of each panel, in the order of the rows."""
    return {
        name: _curves([r for r in rows if r[panel] == name], label, y) for name in dict.fromkeys(r[panel] for r in rows)
    }


def _curves(rows: Iterable[dict], label: str, y: str, x: str = "context") -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(row[label], []).append((row[x], row[y]))
    return found
