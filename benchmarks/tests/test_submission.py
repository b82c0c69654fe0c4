"""A run in one file: its contents, and what is refused, naming the field."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from invented import GOOD, TASK, Invented

from hf_diffkv.cli import USAGE_ERROR
from hf_diffkv.evaluation.errors import EvaluationError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "quality"))

ENTRY = {
    **{"method": "dense", "task": "dictionary", "documents": 4, "digest": "0123", "bytes": 100, "dense_bytes": 100},
    **{"payload_bytes": None, "simulated": False},
    "metrics": {name: {"total": 2.0, "weight": 4.0, "low": 0.25, "high": 0.75} for name in ("right", "kl")},
    "environment": {"python": "3.11", "torch": "2", "transformers": "5", "device": "a GPU", "commit": None},
}
RUN = {"format": 1, "model": "a/b", "dtype": "bfloat16", "seed": 0, "sample": False, "max_new_tokens": None}
CONTENT = {**RUN, "entries": [ENTRY, {**ENTRY, "method": "mine"}]}


@pytest.fixture(scope="module")
def submissions(peers: ModuleType) -> ModuleType:
    return sys.modules["submissions"]


def evaluate(peers: ModuleType, folder: Path, *options: str) -> int:
    given = ["--model", "tiny-lm", "--tasks", TASK, "--methods", f"dense,{GOOD}", "--output", str(folder / "run")]
    return peers.main([*given, "--submit", str(folder / "mine.json"), "--quiet", *options])


def test_what_a_run_submits(peers: ModuleType, submissions: ModuleType, invented: None, tmp_path: Path) -> None:
    assert evaluate(peers, tmp_path, "--documents", "2", "--seed", "3") == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    found = submissions.read_submission(tmp_path / "mine.json")
    assert (found.model, found.dtype, found.seed, found.sample) == ("tiny-lm", "bfloat16", 3, False)
    assert [(entry.method, entry.task, entry.documents) for entry in found.entries] == [
        ("dense", TASK, 2),
        (GOOD, TASK, 2),
    ]
    dense, good = found.entries
    mine = [record for record in records if record["method"] == GOOD]
    assert good.bytes == sum(record["bytes"] for record in mine)
    assert good.ratio == 0.5 and good.digest == dense.digest
    for name in ("right", "kl"):
        sums = [record["metrics"][name] for record in mine]
        figure = good.metrics[name]
        assert (figure.total, figure.weight) == tuple(map(sum, zip(*sums)))
        means = sorted(total / weight for total, weight in sums)
        # a resample of two documents is the one, the other or both
        assert (figure.low, figure.high) == pytest.approx((means[0], means[-1]))
    assert good.environment == mine[0]["environment"] and good.environment["device"]


def test_methods_that_failed_are_left_out(
    peers: ModuleType, submissions: ModuleType, invented: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Invented.raising[GOOD, "invented-1"] = RuntimeError("too big")
    try:
        assert evaluate(peers, tmp_path) == 0
        assert [entry.method for entry in submissions.read_submission(tmp_path / "mine.json").entries] == ["dense"]
    finally:
        Invented.raising.clear()
    with pytest.raises(EvaluationError, match="there is nothing to submit"):
        submissions.write_submission(
            submissions.submission_of([], {"model": "a", "dtype": "b", "seed": 0}), tmp_path / "none.json"
        )
    capsys.readouterr()
    assert evaluate(peers, tmp_path, "--retry", "--submit", str(tmp_path / "none" / "a.json")) == USAGE_ERROR
    assert "cannot write" in capsys.readouterr().err


def change(content: dict[str, Any], place: str, value: Any) -> None:
    *path, last = place.split("/")
    at: Any = content
    for name in path:
        at = at[int(name) if name.isdigit() else name]
    if value is None:
        del at[last]
    else:
        at[last] = value


@pytest.mark.parametrize(
    "place, value, said",
    [
        ("format", 2, "format=2 must be 1"),
        ("model", " ", "model=' ' must be a text"),
        ("seed", None, "seed is missing"),
        ("comment", "fast", "comment is no field"),
        ("entries", [], "entries=[] must be a list of one entry at least"),
        ("entries/1/bytes", -5, "entries[1].bytes=-5 must be an integer of at least 1"),
        ("entries/1/dense_bytes", 1.5, "entries[1].dense_bytes=1.5 must be an integer"),
        ("entries/1/documents", True, "entries[1].documents=True must be an integer"),
        ("entries/0/task", "chess", "entries[0].task='chess' is no task of this version"),
        ("entries/1/method", "dense", "entries[1].method='dense' was there before with task 'dictionary'"),
        ("entries/0/metrics/speed", {}, "entries[0].metrics.speed is no metric of the task 'dictionary'"),
        ("entries/0/metrics/kl/low", float("nan"), "entries[0].metrics.kl.low=nan must be a number"),
        ("entries/0/metrics/kl/low", 9, "entries[0].metrics.kl.low=9 must not be above high="),
        ("entries/0/metrics/right/weight", 0, "entries[0].metrics.right.weight=0 must be above 0"),
        ("entries/1/environment/device", None, "entries[1].environment.device is missing"),
    ],
)
def test_a_wrong_field_is_named(submissions: ModuleType, tmp_path: Path, place: str, value: Any, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CONTENT))
    assert [entry.method for entry in submissions.read_submission(path).entries] == ["dense", "mine"]
    content = json.loads(json.dumps(CONTENT))
    change(content, place, value)
    path.write_text(json.dumps(content))
    with pytest.raises(EvaluationError) as raised:
        submissions.read_submission(path)
    assert f"{path} is no record of an evaluation: {said}" in str(raised.value)


def test_files_that_hold_something_else(submissions: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for content, said in (("{", "it is no JSON"), ("[1]", "it must be an object")):
        path.write_text(content)
        with pytest.raises(EvaluationError, match=said):
            submissions.read_submission(path)
    with pytest.raises(EvaluationError, match="cannot read"):
        submissions.read_submission(tmp_path / "missing.json")
