"""Markdown tables of the records: means per method, and their differences from the dense cache over the same cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hf_diffkv.evaluation.methods.dense import DENSE
from hf_diffkv.evaluation.records import Record
from hf_diffkv.evaluation.statistics import Estimate, estimate

from . import SUITES, suite_of
from .measuring import SCORE


@dataclass(frozen=True)
class Difference:
    """A method's scores minus the dense cache's, over the cases that both answered.

    Attributes:
        estimate: mean difference with its bootstrap interval.
        better, worse: number of cases with a higher and a lower score.
    """

    estimate: Estimate
    better: int
    worse: int


def difference(records: Iterable[Record], dense: Iterable[Record]) -> Difference | None:
    """Returns the paired difference of a method from the dense cache; None without a case that both answered.

    Every case has equal weight, whatever its task. The interval comes from a bootstrap over cases.
    """
    reference = {record.key[1:]: _score(record) for record in dense if record.error is None}
    pairs = [(_score(record), reference.get(record.key[1:])) for record in records if record.error is None]
    differences = [mine - other for mine, other in pairs if other is not None]
    if not differences:
        return None
    return Difference(
        estimate([(value, 1.0) for value in differences]),
        sum(value > 0 for value in differences),
        sum(value < 0 for value in differences),
    )


def tables(records: Sequence[Record], methods: Sequence[str] | None = None) -> str:
    """Formats a table for each suite and length, with a row for each method.

    Args:
        records: records of one model.
        methods: methods in the order of rows; None takes all, the dense cache first and then by bytes.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if methods is None or record.method in methods or record.method == DENSE:
            groups.setdefault(group_of(record), []).append(record)
    titles = {group: " ".join(filter(None, group)) for group in groups}
    return "\n".join(
        f"**{titles[group]}**\n\n{_table(found, methods, _tasks_of(found))}" for group, found in sorted(groups.items())
    )


def summary(records: Sequence[Record], methods: Sequence[str] | None = None) -> str:
    """Formats one table of a suite and a length, with a column for each of the suite's `GROUPS` of tasks.

    Args:
        records: records of one model, one suite and one length.
        methods: methods in the order of rows; None takes all, the dense cache first and then by bytes.
    """
    groups = getattr(suite_of(records[0].task), "GROUPS", None)
    return _table(records, methods, _tasks_of(records) if groups is None else groups)


def overview(columns: Mapping[str, Sequence[Record]], methods: Sequence[str]) -> str:
    """Formats scores and real bytes of methods, with a column for each model and suite.

    A score is the mean over tasks. If a method answered only some of the cases, its score is followed by their number
    and the dense cache's score over them.

    Args:
        columns: records of one model, one suite and one length, by column title.
        methods: methods in the order of rows.
    """
    lines = [["method", *columns], ["---"] * (1 + len(columns))]
    lines += [[f"`{label}`", *(_overview_cell(label, found) for found in columns.values())] for label in methods]
    return markdown(lines)


def group_of(record: Record) -> tuple[str, str]:
    """Returns the suite of a record, and its length if case names contain one."""
    suite = next(name for name, module in SUITES.items() if module is suite_of(record.task))
    length, slash, _ = record.document.rpartition("/")
    return suite, length if slash else ""


def _tasks_of(records: Sequence[Record]) -> dict[str, tuple[str, ...]]:
    order = suite_of(records[0].task).TASKS
    return {task: (task,) for task in sorted({record.task for record in records}, key=order.index)}


def _table(records: Sequence[Record], methods: Sequence[str] | None, groups: Mapping[str, Sequence[str]]) -> str:
    rows = {method: [record for record in records if record.method == method] for method in _order(records, methods)}
    head = ["method", "real bytes", *groups, *(["mean"] if len(groups) > 1 else [])]
    head += ["difference to dense (95 %)", "better, worse", "tokens", "answers"]
    dense = [record for record in records if record.method == DENSE]
    lines = [head, ["---"] * len(head), *(_row(label, found, groups, dense) for label, found in rows.items())]
    text = markdown(lines)
    failed = {
        label: list(dict.fromkeys(record.error for record in found if record.error is not None))
        for label, found in rows.items()
    }
    notes = [f"- `{label}` failed: {error}\n" for label, errors in failed.items() for error in errors]
    return text + ("\n" + "".join(notes) if notes else "")


def _order(records: Sequence[Record], methods: Sequence[str] | None) -> list[str]:
    found = list(dict.fromkeys(record.method for record in records))
    if methods is not None:
        return [label for label in dict.fromkeys([*methods]) if label in found]
    ratio = {label: _ratio([record for record in records if record.method == label]) for label in found}
    return sorted(found, key=lambda label: (label != DENSE, ratio[label] is None, -(ratio[label] or 0.0)))


def _row(
    label: str, records: Sequence[Record], groups: Mapping[str, Sequence[str]], dense: Sequence[Record]
) -> list[str]:
    good = [record for record in records if record.error is None]
    ratio = _ratio(good)
    means = [_mean_of_tasks(good, tasks) for tasks in groups.values()]
    cells = [f"`{label}`", "-" if ratio is None else f"{ratio:.1%}", *map(_percent, means)]
    if len(groups) > 1:
        cells.append(_percent(_mean_of_tasks(good, [task for tasks in groups.values() for task in tasks])))
    found = None if label == DENSE else difference(good, dense)
    cells += ["-", "-"] if found is None else [_with_interval(found.estimate), f"{found.better}, {found.worse}"]
    tokens = _mean([float(record.details["generated_tokens"]) for record in good])
    return [*cells, "-" if tokens is None else f"{tokens:.0f}", _counted(records, good)]


def _overview_cell(label: str, records: Sequence[Record]) -> str:
    good = [record for record in records if record.method == label and record.error is None]
    if not good:
        return "-"
    cases = {record.key[1:] for record in good}
    dense = [record for record in records if record.method == DENSE and record.error is None]
    same = [record for record in dense if record.key[1:] in cases]
    text = f"{_percent(_mean_of_tasks(good, _tasks_of(good)))} ({_ratio(good):.1%})"
    if len(same) < len(dense):
        text += f", {len(same)} cases, dense {_percent(_mean_of_tasks(same, _tasks_of(same)))}"
    return text


def _mean_of_tasks(records: Sequence[Record], tasks: Iterable[str]) -> float | None:
    """Mean over tasks of each task's mean score; None if a task has no record."""
    means = [_mean([_score(record) for record in records if record.task == task]) for task in tasks]
    return None if None in means else _mean([mean for mean in means if mean is not None])


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """Formats a table from lines, the first two of which are its header."""
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _counted(records: Sequence[Record], good: Sequence[Record]) -> str:
    return f"{len(good)}" if len(good) == len(records) else f"{len(good)} of {len(records)}"


def _score(record: Record) -> float:
    total, weight = record.metrics[SCORE]
    return total / weight


def _ratio(records: Sequence[Record]) -> float | None:
    known = [(record.bytes, record.dense_bytes) for record in records if record.error is None]
    if not known or any(held is None or not dense for held, dense in known):
        return None
    return sum(held for held, _ in known) / sum(dense for _, dense in known)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _with_interval(found: Estimate) -> str:
    mean, low, high = (100 * value for value in (found.mean, found.low, found.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
