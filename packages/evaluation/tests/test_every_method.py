"""A slice of everything: every method that runs here on every task that needs no Hub, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_diffkv_evaluation import report
from hf_diffkv_evaluation.methods import METHODS

from hf_diffkv.cli import main
from hf_diffkv.evaluation.records import Record
from hf_diffkv.evaluation.tasks import TASKS, facts, suites, text
from hf_diffkv.policy import POLICIES

LOSSLESS = "diffkv:lossless"
METHOD_LABELS = ["dense", "diffkv:K4V2", LOSSLESS, "quanto:4", "hqq:4", "fp8"]
# every policy of the library is a method; "first_tokens" is the example's
METHOD_LABELS += sorted(set(POLICIES) - {"diffkv", "first_tokens"})
TASK_NAMES = suites()["offline"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CONTINUED", 32)
        patch.setattr(text, "STEPS", 8)
        patch.setattr(facts, "TALK", 1)
        patch.setattr(facts, "WORDS", 5)
        patch.setattr(facts, "PASSAGES", 2)
        patch.setattr(facts, "PEOPLE", 3)
        # drawn below, of one task
        patch.setattr(report, "plot_tasks", lambda records, folder: [])
        options = ["--tasks", ",".join(TASK_NAMES), "--methods", ",".join(METHOD_LABELS), "--documents", "1"]
        options += ["--model", "tiny-lm", "--dtype", "float32", "--length", "440", "--output", str(folder), "--quiet"]
        assert main(["evaluate", *options]) == 0
    return folder


@pytest.fixture(scope="module")
def records(run: Path) -> dict[tuple[str, str], dict]:
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return {(line["task"], line["method"]): line for line in lines}


def test_all_families_are_in_it() -> None:
    families = {label.partition(":")[0] for label in METHOD_LABELS}
    # other tests may have made a policy of their own known
    assert families == set(METHODS.names()) - {"first_tokens"}


@pytest.mark.slow
def test_all_have_figures(records: dict) -> None:
    assert set(records) == {(task, method) for task in TASK_NAMES for method in METHOD_LABELS}
    for (task, _), record in records.items():
        assert record["error"] is None
        assert {metric.name for metric in TASKS.find(task).metrics} <= set(record["metrics"])
        assert record["dense_bytes"] == records[task, "dense"]["bytes"]


@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.slow
def test_lossless_is_as_good_as_dense(task: str, records: dict) -> None:
    dense, lossless = records[task, "dense"], records[task, LOSSLESS]
    kl, count = lossless["metrics"]["kl"]
    assert 0 <= kl < 1e-5 * count
    assert lossless["metrics"]["top1"] == dense["metrics"]["top1"]
    assert lossless["metrics"]["nll"] == pytest.approx(dense["metrics"]["nll"], abs=1e-4 * count)
    if "right" in dense["metrics"]:
        assert lossless["metrics"]["right"] == dense["metrics"]["right"]
        assert lossless["details"]["answers"] == dense["details"]["answers"]
    assert lossless["payload_bytes"] == dense["bytes"]


@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.slow
def test_compression_shows(task: str, records: dict) -> None:
    """Checks bytes and differing distributions. So the questions have gone through the compressed cache."""
    for method in set(METHOD_LABELS) - {"dense", LOSSLESS}:
        record = records[task, method]
        assert record["bytes"] < 0.7 * record["dense_bytes"]
        assert record["metrics"]["kl"][0] > 1e-4
    assert records[task, "dense"]["metrics"]["kl"][0] == 0


@pytest.mark.slow
def test_table(run: Path) -> None:
    table = (run / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(METHOD_LABELS)
    assert table[2].startswith("| dense | 100.0% |")


@pytest.mark.slow
def test_plots(records: dict, tmp_path: Path) -> None:
    paths = report.plot_tasks([Record(**record) for (task, _), record in records.items() if task == "text"], tmp_path)
    assert [path.name for path in paths] == ["text-kl.png", "text-top1.png", "text-nll.png"]
    assert all(path.stat().st_size > 5000 for path in paths)
