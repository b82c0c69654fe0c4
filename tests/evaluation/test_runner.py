"""Order and number of runs, and the results that a failure or an interrupt leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_diffkv_evaluation.report import markdown
from invented import BAD, DENSE_BYTES, GOOD, MODEL, TASK, Invented

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.records import RunFolder
from hf_diffkv.evaluation.runner import check_fits, documents_of, run
from hf_diffkv.evaluation.tasks import Document, get_task
from hf_diffkv.evaluation.tasks.base import Source

pytestmark = pytest.mark.usefixtures("invented")

SETTINGS = {"model": "none"}


def go(path: Path, *labels: str, count: int = 3, retry: bool = False) -> RunFolder:
    task = get_task(TASK)
    folder = RunFolder(path, SETTINGS)
    methods = [get_method(label) for label in labels]
    run(MODEL, methods, [(task, documents_of(task, Source(None, count)))], folder, retry=retry, quiet=True)
    return folder


def measured() -> list[tuple[str, int]]:
    found = [(label, int(name[-1])) for label, name in Invented.measured]
    Invented.measured.clear()
    return found


def test_document_by_document_dense_first(tmp_path: Path) -> None:
    folder = go(tmp_path, GOOD, "dense", BAD, count=2)
    expected = [("dense", 0), (GOOD, 0), (BAD, 0), ("dense", 1), (GOOD, 1), (BAD, 1)]
    assert measured() == expected
    assert [(record.method, int(record.document[-1])) for record in folder.records()] == expected


def test_what_a_record_holds(tmp_path: Path) -> None:
    record = go(tmp_path, "dense", BAD).records()[-1]
    assert (record.method, record.task, record.document) == (BAD, TASK, "invented-2")
    assert record.metrics == {"right": [2.0, 10.0], "kl": [0.8 * 3, 3.0]}
    assert (record.bytes, record.dense_bytes, record.simulated, record.error) == (400, DENSE_BYTES[2], True, None)
    assert record.details == {"index": 2}
    assert record.seconds >= 0
    assert {"python", "torch", "transformers", "commit", "device", "threads"} <= set(record.environment)


def test_without_the_dense_cache_it_is_the_reference_all_the_same(tmp_path: Path) -> None:
    records = go(tmp_path, GOOD, count=1).records()
    assert measured() == [("dense", 0), (GOOD, 0)]
    assert [(record.method, record.dense_bytes) for record in records] == [(GOOD, 1000)]


def test_nothing_is_run_twice(tmp_path: Path) -> None:
    before = go(tmp_path, "dense", GOOD).path.read_bytes()
    measured()
    assert go(tmp_path, "dense", GOOD).path.read_bytes() == before
    assert measured() == []


def test_a_further_method_needs_the_reference_again(tmp_path: Path) -> None:
    go(tmp_path, "dense", GOOD, count=1)
    measured()
    records = go(tmp_path, "dense", GOOD, BAD, count=1).records()
    assert measured() == [("dense", 0), (BAD, 0)]
    assert [record.method for record in records] == ["dense", GOOD, BAD]


def test_further_documents(tmp_path: Path) -> None:
    go(tmp_path, "dense", GOOD, count=1)
    measured()
    assert len(go(tmp_path, "dense", GOOD, count=3).records()) == 6
    assert measured() == [("dense", 1), (GOOD, 1), ("dense", 2), (GOOD, 2)]


def test_a_document_of_one_name_and_other_content_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path, "dense", count=1)
    monkeypatch.setattr(Invented, "length", 9)
    assert len(go(tmp_path, "dense", count=1).records()) == 2


def test_a_method_that_raises_is_a_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Invented.raising[GOOD, "invented-1"] = RuntimeError("does\n  not fit")
    folder = go(tmp_path, "dense", GOOD, BAD)
    failed = [record for record in folder.records() if record.error is not None]
    assert [(record.method, record.document, record.error) for record in failed] == [
        (GOOD, "invented-1", "RuntimeError: does not fit")
    ]
    assert failed[0].metrics == {} and failed[0].bytes is None
    # the others went on
    assert len(folder.records()) == 9
    assert f"{GOOD} failed on invented-1: RuntimeError: does not fit" in capsys.readouterr().out


def test_a_dense_cache_that_raises_fails_all(tmp_path: Path) -> None:
    Invented.raising["dense", "invented-0"] = MemoryError()
    folder = go(tmp_path, "dense", GOOD, count=2)
    assert measured() == [("dense", 0), ("dense", 1), (GOOD, 1)]
    assert [record.error for record in folder.records()] == ["MemoryError:", "dense: MemoryError:", None, None]


def test_failures_are_run_again_on_demand(tmp_path: Path) -> None:
    Invented.raising[GOOD, "invented-1"] = RuntimeError()
    go(tmp_path, "dense", GOOD)
    Invented.raising.clear()
    measured()
    assert [record.error for record in go(tmp_path, "dense", GOOD).records()].count(None) == 5
    assert measured() == []
    assert [record.error for record in go(tmp_path, "dense", GOOD, retry=True).records()] == [None] * 6
    assert measured() == [("dense", 1), (GOOD, 1)]


@pytest.mark.parametrize("label", ["dense", GOOD, BAD])
@pytest.mark.parametrize("document", ["invented-0", "invented-1"])
def test_an_interrupted_run_goes_on(tmp_path: Path, label: str, document: str) -> None:
    whole = markdown(go(tmp_path / "whole", "dense", GOOD, BAD).records())
    every = measured()
    Invented.raising[label, document] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "parts", "dense", GOOD, BAD)
    first = measured()
    Invented.raising.clear()
    resumed = go(tmp_path / "parts", "dense", GOOD, BAD)
    assert markdown(resumed.records()) == whole
    # what was interrupted is run again, and the reference of that document
    again = [pair for pair in measured() if pair in first]
    assert set(again) <= {(label, int(document[-1])), ("dense", int(document[-1]))}
    assert set(first) < set(every)


def test_what_the_user_can_put_right_ends_the_run(tmp_path: Path) -> None:
    Invented.raising[GOOD, "invented-1"] = EvaluationError("lower it")
    with pytest.raises(EvaluationError, match="lower it"):
        go(tmp_path, "dense", GOOD)
    assert len(RunFolder(tmp_path, SETTINGS).records()) == 3


def test_documents_longer_than_the_model() -> None:
    documents = [Document("a", (1,) * 90), Document("b", (1,) * 80, continuation=(1,) * 30)]
    task = get_task(TASK)
    check_fits(task, documents, 110)
    check_fits(task, documents, None)
    check_fits(task, [], 1)
    with pytest.raises(EvaluationError, match="'invented' needs 110 tokens but the model's .* is 109; lower --length"):
        check_fits(task, documents, 109)
