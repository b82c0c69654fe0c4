"""Quality against real bytes, a picture for each metric of each task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .. import plot
from .records import Record
from .report import Cell, ResultRow, rows_of


def plot_tasks(records: Iterable[Record], folder: Path) -> list[Path]:
    """Writes `TASK-METRIC.png` into `folder` for every task and metric; the paths.

    Raises:
        ImportError: matplotlib is missing.
    """
    rows = [row for row in rows_of(records) if row.ratio is not None]
    written = []
    for task, name in dict.fromkeys(key for row in rows for key in row.cells):
        found = [row for row in rows if row.cells[task, name].estimate is not None]
        if not found:
            continue
        metric = found[0].cells[task, name].metric
        better = "higher" if metric.higher_is_better else "lower"
        picture = plot.quality(
            [_point(row, row.cells[task, name]) for row in found],
            title=task,
            ylabel=f"{metric.title} ({better} is better)",
            logarithmic=metric.name.startswith("kl"),
        )
        written.append(picture.save(folder / f"{task}-{name}.png"))
    return written


def _point(row: ResultRow, cell: Cell) -> plot.Point:
    figures = (cell.estimate.mean, cell.estimate.low, cell.estimate.high)
    return plot.Point(row.method, row.ratio, *map(cell.metric.transform, figures))
