"""Reports a run as a table with a row per method, and as plots of quality against measured bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_diffkv.evaluation.methods.dense import DENSE
from hf_diffkv.evaluation.records import Record
from hf_diffkv.evaluation.statistics import Estimate, estimate
from hf_diffkv.evaluation.tasks import Metric, get_task

from .scatter import Point, quality


@dataclass(frozen=True)
class Cell:
    """A metric of one method on one task.

    Attributes:
        metric: the metric.
        estimate: mean with its interval; None if the method has no figure.
        failed: number of documents on which the method failed.
    """

    metric: Metric
    estimate: Estimate | None
    failed: int = 0

    def __str__(self) -> str:
        return "failed" if self.estimate is None and self.failed else format_estimate(self.metric, self.estimate)


@dataclass(frozen=True)
class ResultRow:
    """Row of one method.

    Attributes:
        method: label of the method.
        ratio, payload_ratio: bytes / dense bytes over the documents of all tasks; None if unknown.
        simulated: whether bytes of a document were computed instead of measured.
        cells: results by task and name of the metric.
        errors: distinct errors of the method.
        documents: number of documents the method was run on, and number that any method was run on; rows with fewer
            documents are not comparable.
    """

    method: str
    ratio: float | None
    payload_ratio: float | None
    simulated: bool
    cells: dict[tuple[str, str], Cell]
    errors: tuple[str, ...]
    documents: tuple[int, int]


def rows_of(records: Iterable[Record]) -> list[ResultRow]:
    """Makes a row for each method, in order of first records."""
    records = list(records)
    methods = list(dict.fromkeys(record.method for record in records))
    tasks = list(dict.fromkeys(record.task for record in records))
    documents = len({record.key[1:] for record in records})
    rows = []
    for method in methods:
        mine = [record for record in records if record.method == method]
        rows.append(_row(method, mine, tasks, documents))
    return rows


def _row(method: str, records: Sequence[Record], tasks: Sequence[str], documents: int) -> ResultRow:
    cells = {}
    for task in tasks:
        mine = [record for record in records if record.task == task]
        good = [record for record in mine if record.error is None]
        for metric in get_task(task).metrics:
            sums = [record.metrics[metric.name] for record in good if metric.name in record.metrics]
            # a mean over the documents that worked would flatter a method that fails on the hard ones
            whole = bool(sums) and len(good) == len(mine)
            cells[task, metric.name] = Cell(metric, estimate(sums) if whole else None, len(mine) - len(good))
    good = [record for record in records if record.error is None]
    return ResultRow(
        method,
        _quotient([(record.bytes, record.dense_bytes) for record in good]),
        _quotient([(record.payload_bytes, record.dense_bytes) for record in good]),
        any(record.simulated for record in good),
        cells,
        tuple(dict.fromkeys(record.error for record in records if record.error is not None)),
        (len(records), documents),
    )


def _quotient(pairs: Sequence[tuple[int | None, int | None]]) -> float | None:
    known = [(a, b) for a, b in pairs if a is not None and b]
    if not pairs or len(known) < len(pairs):
        return None
    return sum(a for a, _ in known) / sum(b for _, b in known)


def format_estimate(metric: Metric, value: Estimate | None) -> str:
    """Formats a figure for a table."""
    if value is None or not value.weight:
        return "-"
    if metric.digits is None:
        return f"{value.total:g} of {value.weight:g}"
    return f"{metric.transform(value.mean):.{metric.digits}f}"


def markdown(records: Iterable[Record]) -> str:
    """Formats a Markdown table, followed by errors and by methods that were run on fewer documents than others."""
    rows = best_first(rows_of(records))
    columns = list(dict.fromkeys(key for row in rows for key in row.cells))
    titles = {key: next(row.cells[key].metric.title for row in rows if key in row.cells) for key in columns}
    head = ["method", "real bytes", "payload", *(f"{task}: {titles[task, name]}" for task, name in columns)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        ratio = _percent(row.ratio) + (" (simulated)" if row.simulated else "")
        cells = [str(row.cells.get(key, "-")) for key in columns]
        lines.append([row.method, ratio, _percent(row.payload_ratio), *cells])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [f"- `{row.method}` failed: {error}" for row in rows for error in row.errors]
    for row in rows:
        count, documents = row.documents
        if count < documents:
            notes.append(f"- `{row.method}` was run on {count} of {documents} documents.")
    return table + ("\n\n" + "\n".join(notes) if notes else "") + "\n"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def best_first(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Sorts rows: the dense cache first, then by decreasing bytes."""
    return sorted(rows, key=lambda row: (row.method != DENSE, row.ratio is None, -(row.ratio or 0.0)))


def plot_tasks(records: Iterable[Record], folder: Path) -> list[Path]:
    """Writes `TASK-METRIC.png` into `folder` for every task and metric, and returns the paths.

    Raises:
        ImportError: matplotlib is missing.
    """
    rows = rows_of(records)
    written = []
    for task, name in dict.fromkeys(key for row in rows for key in row.cells):
        metric = rows[0].cells[task, name].metric
        points = []
        for row in rows:
            value = row.cells[task, name].estimate
            if value is not None and row.ratio is not None:
                points.append(Point(row.method, row.ratio, *map(metric.transform, (value.mean, value.low, value.high))))
        if not points:
            continue
        better = "higher" if metric.higher_is_better else "lower"
        ylabel = f"{metric.title} ({better} is better)"
        picture = quality(points, title=task, ylabel=ylabel, logarithmic=metric.name.startswith("kl"))
        written.append(picture.save(folder / f"{task}-{name}.png"))
    return written
