"""The table and the plots of records made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hf_diffkv_evaluation.report import format_estimate, markdown, plot_tasks, rows_of
from invented import BAD, GOOD, TASK
from matplotlib.image import imread

from hf_diffkv.evaluation.records import Record
from hf_diffkv.evaluation.statistics import Estimate
from hf_diffkv.evaluation.tasks.base import KL, PERPLEXITY, RIGHT

pytestmark = pytest.mark.usefixtures("invented")


def record(method: str, index: int, right: float, kl: float, held: int, dense: int, **fields) -> Record:
    metrics = {"right": (right, 10.0), "kl": (kl, 5.0)}
    return Record(method, TASK, f"d{index}", f"{index}", metrics, bytes=held, dense_bytes=dense, **fields)


DENSE = [record("dense", index, 10, 0, dense, dense, payload_bytes=dense) for index, dense in enumerate((1000, 3000))]
HALF = [
    record(GOOD, 0, 8, 1.0, 600, 1000, payload_bytes=500),
    record(GOOD, 1, 6, 0.5, 1400, 3000, payload_bytes=1300, simulated=True),
]
FAILED = Record(BAD, TASK, "d1", "1", error="ValueError: too | long")


def table(records: list[Record]) -> tuple[list[list[str]], list[str]]:
    """Cells of the rows, and the notes below."""
    lines = markdown(records).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return rows, [line for line in lines if line.startswith("- ")]


def test_figures_are_quotients_of_sums() -> None:
    rows, notes = table([*DENSE, *HALF])
    assert rows[0] == ["method", "real bytes", "payload", "invented: right", "invented: KL"]
    assert rows[2] == ["dense", "100.0%", "100.0%", "20 of 20", "0.0000"]
    assert rows[3] == [GOOD, "50.0% (simulated)", "45.0%", "14 of 20", "0.1500"]
    assert notes == []


def test_the_dense_cache_first_then_by_bytes() -> None:
    small = [dataclasses.replace(one, method=BAD, bytes=100) for one in HALF]
    rows, _ = table([*small, FAILED, *HALF, *DENSE])
    assert [row[0] for row in rows[2:]] == ["dense", GOOD, BAD]
    rows, _ = table([dataclasses.replace(FAILED, method="worst"), *small, *HALF])
    assert [row[0] for row in rows[2:]] == [GOOD, BAD, "worst"]


def test_a_method_that_failed_on_one_document_has_no_mean() -> None:
    """A mean over those that worked would flatter a method that fails on the hard ones."""
    rows, notes = table([*DENSE, dataclasses.replace(HALF[0], method=BAD), FAILED])
    assert rows[3] == [BAD, "60.0%", "50.0%", "failed", "failed"]
    assert notes == [f"- `{BAD}` failed: ValueError: too | long"]


def test_reasons_are_said_once() -> None:
    rows, notes = table([FAILED, dataclasses.replace(FAILED, document="d2", digest="2")])
    assert rows[2] == [BAD, "-", "-", "failed", "failed"]
    assert len(notes) == 1


def test_fewer_documents_are_told() -> None:
    _, notes = table([*DENSE, HALF[0]])
    assert notes == [f"- `{GOOD}` was run on 1 of 2 documents."]


def test_what_is_missing_is_a_dash() -> None:
    no_kl = [dataclasses.replace(one, metrics={"right": (0, 0)}, payload_bytes=None) for one in HALF]
    other = dataclasses.replace(DENSE[0], task="text", document="text-0", metrics={"kl": (0, 5)})
    rows, _ = table([*DENSE, *no_kl, other])
    cells = dict(zip(rows[0], rows[3]))
    assert cells["method"] == GOOD and cells["payload"] == cells["invented: right"] == cells["invented: KL"] == "-"
    assert cells["text: KL"] == cells["text: perplexity"] == "-"


def test_figures() -> None:
    three = Estimate(30.0, 40.0, 0.7, 0.8)
    assert format_estimate(RIGHT, three) == "30 of 40"
    assert format_estimate(KL, three) == "0.7500"
    # exp(2)
    assert format_estimate(PERPLEXITY, Estimate(20.0, 10.0, 1.0, 3.0)) == "7.39"
    assert format_estimate(KL, None) == format_estimate(KL, Estimate(0, 0, 0, 0)) == "-"


def test_rows_keep_their_estimates() -> None:
    row = rows_of([*DENSE, *HALF])[1]
    assert (row.method, row.ratio, row.payload_ratio, row.simulated) == (GOOD, 0.5, 0.45, True)
    assert row.cells[TASK, "right"].estimate.mean == 0.7


def test_plots(tmp_path: Path) -> None:
    never = [dataclasses.replace(one, method="never", error="no", bytes=None, metrics={}) for one in HALF]
    paths = plot_tasks([*DENSE, *HALF, *never], tmp_path)
    assert [path.name for path in paths] == ["invented-right.png", "invented-kl.png"]
    (tmp_path / "dense").mkdir()
    blank = plot_tasks(DENSE, tmp_path / "dense")
    for path, other in zip(paths, blank):
        picture = imread(path)
        assert picture.shape[0] > 400 and picture.shape[1] > 700
        # more than the axes and the dense cache
        assert (picture != imread(other)).any()


def test_nothing_to_plot(tmp_path: Path) -> None:
    assert plot_tasks([FAILED], tmp_path) == []
    assert list(tmp_path.iterdir()) == []
