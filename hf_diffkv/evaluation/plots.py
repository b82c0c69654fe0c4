"""Quality against real bytes, a picture for each metric of each task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .methods.dense import DENSE
from .records import Record
from .report import Cell, rows_of

# one mark and colour per family; grey ones tell apart by their marks
STYLES = {
    DENSE: ("*", "#000000"),
    "diffkv": ("o", "#1b4f72"),
    "quanto": ("s", "#b9770e"),
    "hqq": ("D", "#7d6608"),
    "fp8": ("P", "#6e2c00"),
    "kvpress": ("X", "#943126"),
}
OTHER = ("^", "#616a6b")


def plot_tasks(records: Iterable[Record], folder: Path) -> list[Path]:
    """Writes `TASK-METRIC.png` into `folder` for every task and metric; the paths.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib.") from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows_of(records) if row.ratio is not None]
    written = []
    for task, name in dict.fromkeys(key for row in rows for key in row.cells):
        points = [(row, row.cells[task, name]) for row in rows if row.cells[task, name].estimate is not None]
        if not points:
            continue
        figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
        for row, cell in points:
            _draw(axes, row.method, 100 * row.ratio, cell)
        metric = points[0][1].metric
        axes.set_xlabel("real bytes, % of the dense cache")
        axes.set_ylabel(f"{metric.title} ({'higher' if metric.higher_is_better else 'lower'} is better)")
        axes.set_title(task)
        if metric.name.startswith("kl"):
            axes.set_yscale("symlog", linthresh=1e-3)
        axes.grid(alpha=0.3)
        path = folder / f"{task}-{name}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        written.append(path)
    return written


def _draw(axes, method: str, x: float, cell: Cell) -> None:
    mark, colour = STYLES.get(method.partition(":")[0], OTHER)
    y, low, high = (cell.metric.transform(v) for v in (cell.estimate.mean, cell.estimate.low, cell.estimate.high))
    axes.errorbar(x, y, yerr=[[max(y - low, 0)], [max(high - y, 0)]], fmt=mark, color=colour, capsize=2, elinewidth=0.7)
    axes.annotate(method, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour)
