"""Writes the tables of README.md, the quality pages and the gallery from the committed results, and copies plots.

    python benchmarks/quality/document.py

Each table is between a marker, `<!-- MARKER -->`, and `<!-- end -->`:

    study: NAME METRIC,... METHOD;...           a study; METRIC is task/metric, & joins studies, no METHOD means all
    levels: NAME METHOD;...                     share of a study's tokens at each level by task, over layers and heads
    field: MODEL/SUITE[/LENGTH],... METHOD;...  results of `field.py`: a suite by groups of tasks, or a column for each
    long_text: FILE, tool_calls: FILE           output of the script of that name
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import gallery
from field_tasks import SUITES
from field_tasks.tables import group_of, markdown, overview, summary
from hf_diffkv_evaluation.report import Cell, ResultRow, best_first, rows_of
from loss_tables import long_text_table, tool_calls_table

from hf_diffkv.evaluation.records import ENVIRONMENTS_NAME, RECORDS_NAME, Record, read_records

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "quality"
FIELD_RESULTS = RESULTS.parent / "field"
DOCUMENTS = [ROOT / name for name in ("README.md", "docs/quality.md", "docs/notes/quality-studies.md")]
PICTURES = ROOT / "docs" / "quality"
LEVEL_NAMES = ("high", "low", "pruned", "window")
MARK = r"<!-- study: (?P<studies>\S+) (?P<metrics>\S+)(?: (?P<methods>\S+))? -->\n"
BLOCK = re.compile(rf"(?P<head>{MARK}).*?(?P<end><!-- end -->)", re.DOTALL)
LEVELS_MARK = r"<!-- levels: (?P<study>\S+) (?P<methods>\S+) -->\n"
LEVELS_BLOCK = re.compile(rf"(?P<head>{LEVELS_MARK}).*?(?P<end><!-- end -->)", re.DOTALL)
FIELD_MARK = r"<!-- field: (?P<columns>\S+) (?P<methods>\S+) -->\n"
FIELD_BLOCK = re.compile(rf"(?P<head>{FIELD_MARK}).*?(?P<end><!-- end -->)", re.DOTALL)
LOSS_BLOCK = re.compile(
    r"(?P<head><!-- (?P<script>long_text|tool_calls): (?P<name>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)
LOSS_TABLES = {"long_text": long_text_table, "tool_calls": tool_calls_table}


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text()))
    text = "".join(path.read_text() for path in DOCUMENTS)
    PICTURES.mkdir(exist_ok=True)
    for name in re.findall(r"\((?:\.\./|docs/)?quality/([^)]+\.png)\)", text):
        # quality/peers-text-kl.png is text-kl.png of the study peers; a folder before it names the model
        model, _, last = name.rpartition("/")
        study, _, picture = last.partition("-")
        found = next(path for path in RESULTS.glob(f"{model or '**'}/{study}/{picture}"))
        (PICTURES / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(found, PICTURES / name)
    gallery.main()


def filled(text: str) -> str:
    """`text` with all tables regenerated."""
    for block, made in BLOCKS.items():
        text = block.sub(lambda match, made=made: match["head"] + made(match) + match["end"], text)
    return text


def _parts(match: re.Match) -> dict[str, list[str] | None]:
    methods = match["methods"]
    return {
        "studies": match["studies"].split("&"),
        "metrics": match["metrics"].split(","),
        "methods": None if methods is None else methods.split(";"),
    }


def records_of(study: str) -> list[Record]:
    """Returns the records of a study, `MODEL/NAME`."""
    folder = RESULTS / study
    return read_records([folder / RECORDS_NAME, *sorted(folder.glob(f"{ENVIRONMENTS_NAME}/*/{RECORDS_NAME}"))])


def table(studies: list[str], metrics: list[str], methods: list[str] | None = None) -> str:
    """Markdown table with a row for each method by real bytes, and the metrics with their 95 % intervals."""
    keys = [tuple(metric.split("/")) for metric in metrics]
    # for a method in several studies, the first study counts
    found = [row for study in studies for row in rows_of(records_of(study))]
    rows = best_first(_first_of_each(found))
    if methods is not None:
        rows = [row for row in rows if row.method in methods]
    titles = {key: rows[0].cells[key].metric.title for key in keys}
    head = ["method", "real bytes", "payload", *(f"{task}: {titles[task, name]}" for task, name in keys)]
    lines = [head, ["---"] * len(head), *(_line(row, keys) for row in rows)]
    return markdown(lines)


def levels_table(study: str, methods: list[str]) -> str:
    """Markdown table with a row for each method and task, and shares of all tokens, prompt and answers."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for record in records_of(study):
        if record.method in methods and record.error is None:
            counts.setdefault((record.method, record.task), Counter()).update(record.details["levels"])
    head = ["method", "task", *LEVEL_NAMES]
    lines = [head, ["---"] * len(head)]
    for (method, task), found in sorted(counts.items(), key=lambda item: methods.index(item[0][0])):
        shares = [found[name] / found.total() for name in LEVEL_NAMES]
        lines.append([f"`{method}`", task, *(f"{share:.1%}" for share in shares)])
    return markdown(lines)


def field_table(columns: list[str], methods: list[str]) -> str:
    """Markdown table of scores on field suites, `MODEL/SUITE` or `MODEL/SUITE/LENGTH`; several have a column each."""
    found = {_field_title(*column.split("/")): _field_records(*column.split("/")) for column in columns}
    return overview(found, methods) if len(found) > 1 else summary(*found.values(), methods)


def _field_title(model: str, *suite: str) -> str:
    return f"{' '.join(suite)}, {model}"


def _field_records(model: str, suite: str, length: str = "") -> list[Record]:
    files = [FIELD_RESULTS / model / f"{task}.jsonl" for task in sorted(SUITES[suite].TASKS)]
    records = read_records([file for file in files if file.exists()])
    return [record for record in records if group_of(record) == (suite, length)]


def _first_of_each(rows: list[ResultRow]) -> list[ResultRow]:
    names = [row.method for row in rows]
    return [row for index, row in enumerate(rows) if row.method not in names[:index]]


def _line(row: ResultRow, keys: list[tuple[str, str]]) -> list[str]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.1%}" + (" (simulated)" if row.simulated else "")
    payload = "-" if row.payload_ratio is None else f"{row.payload_ratio:.1%}"
    return [f"`{row.method}`", ratio, payload, *(_with_interval(row.cells[key]) for key in keys)]


def _with_interval(cell: Cell) -> str:
    if cell.estimate is None or not cell.estimate.weight:
        return str(cell)
    digits = cell.metric.digits
    low, high = (cell.metric.transform(x) for x in (cell.estimate.low, cell.estimate.high))
    bounds = f"{low:.0%} to {high:.0%}" if digits is None else f"{low:.{digits}f} to {high:.{digits}f}"
    return f"{cell} ({bounds})"


BLOCKS = {
    BLOCK: lambda match: table(**_parts(match)),
    LEVELS_BLOCK: lambda match: levels_table(match["study"], match["methods"].split(";")),
    LOSS_BLOCK: lambda match: LOSS_TABLES[match["script"]](match["name"]),
    FIELD_BLOCK: lambda match: field_table(match["columns"].split(","), match["methods"].split(";")),
}


if __name__ == "__main__":
    main()
