"""A run's folder: goes on where it was, mends what a kill left, refuses what it cannot go on with."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from full_disk import full_disk

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.records import Record, RunFolder, read_records

SETTINGS = {"model": "tiny-lm", "dtype": "float32", "seed": 0}
RECORD = Record(
    "diffkv:K8V4",
    "text",
    "text-0",
    "0123",
    metrics={"kl": (0.25, 255.0)},
    bytes=100,
    payload_bytes=80,
    dense_bytes=200,
    seconds=1.5,
    details={"answers": [True, False]},
    environment={"python": "3.11.7"},
)
FAILED = dataclasses.replace(RECORD, method="quanto:2", metrics={}, bytes=None, error="ValueError: no")


def same(found: list[Record], expected: list[Record]) -> bool:
    """JSON has no tuples."""
    return [json.loads(json.dumps(dataclasses.asdict(record))) for record in expected] == list(
        map(dataclasses.asdict, found)
    )


def test_written_and_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", SETTINGS)
    assert folder.records() == folder.all_records() == []
    for record in (RECORD, FAILED):
        folder.add(record)
    assert same(RunFolder(tmp_path / "a" / "run", SETTINGS).records(), [RECORD, FAILED])
    assert len(folder.path.read_text().splitlines()) == 2


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Folder of a run with one record."""
    folder = RunFolder(tmp_path, SETTINGS)
    folder.add(RECORD)
    return folder


def test_the_last_of_one_key_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    again = dataclasses.replace(FAILED, error=None, bytes=50)
    for record in (FAILED, RECORD, again):
        folder.add(record)
    assert same(folder.records(), [again, RECORD])
    other = dataclasses.replace(RECORD, digest="4567")
    folder.add(other)
    assert same(folder.records(), [again, RECORD, other])


@pytest.mark.parametrize("cut", [1, 20])
def test_half_a_line_is_mended(folder: RunFolder, tmp_path: Path, cut: int) -> None:
    folder.add(FAILED)
    folder.path.write_bytes(folder.path.read_bytes()[:-cut])
    folder = RunFolder(tmp_path, SETTINGS)
    assert same(folder.records(), [RECORD])
    folder.add(FAILED)
    assert same(folder.records(), [RECORD, FAILED])


def test_half_of_the_first_line_is_mended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    folder.path.write_text('{"method": "den')
    assert RunFolder(tmp_path, SETTINGS).records() == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model", "smollm2", "a run with model='tiny-lm', not 'smollm2'"),
        ("seed", 1, "a run with seed=0, not 1"),
        ("batch", 4, "a run with batch=None, not 4"),
    ],
)
def test_other_settings_are_refused(folder: RunFolder, tmp_path: Path, name: str, value: object, said: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(said)):
        RunFolder(tmp_path, {**SETTINGS, name: value})
    assert same(folder.records(), [RECORD])


def test_a_setting_less_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path, SETTINGS)
    with pytest.raises(EvaluationError, match="seed=0, not None"):
        RunFolder(tmp_path, {"model": "tiny-lm", "dtype": "float32"})


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_damaged_settings(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(EvaluationError, match="run.json is damaged; choose another --output"):
        RunFolder(tmp_path, SETTINGS)


KEY = b'"task": "a", "document": "b", "digest": "c"'
DAMAGED = [b"{not json", b"[1, 2]", b'{"method": "dense"}', b'{"unknown": 1}', b"\xff\xfe"]
DAMAGED += [b'{"method": [], %s}' % KEY, b'{"method": "dense", "metrics": null, %s}' % KEY]


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_records(folder: RunFolder, line: bytes) -> None:
    with open(folder.path, "ab") as file:
        file.write(line + b"\n")
    folder.add(FAILED)
    with pytest.raises(EvaluationError, match=r"records.jsonl(, line 2 is not a record| holds no records)"):
        folder.records()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="cannot write to .*file: "):
        RunFolder(tmp_path / "file", SETTINGS)
    (tmp_path / "taken" / "run.json").mkdir(parents=True)
    with pytest.raises(EvaluationError, match="cannot write to .*taken: "):
        RunFolder(tmp_path / "taken", SETTINGS)


def test_a_disk_that_is_full(folder: RunFolder) -> None:
    before = folder.path.read_bytes()
    with full_disk(len(before) + 40), pytest.raises(EvaluationError, match="cannot write to .*: File too large"):
        folder.add(FAILED)
    # half of the line was written
    assert folder.path.read_bytes() == before
    folder.add(FAILED)
    assert same(folder.records(), [RECORD, FAILED])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot read .*none.jsonl"):
        read_records([tmp_path / "none.jsonl"])


def test_records_of_other_environments_join(folder: RunFolder, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(RECORD, method="kvpress:snapkv+0.5")
    RunFolder(tmp_path / "environments" / "kvpress", SETTINGS).add(elsewhere)
    # another run that happens to lie within
    RunFolder(tmp_path / "second", SETTINGS).add(FAILED)
    assert same(folder.records(), [RECORD])
    assert same(folder.all_records(), [RECORD, elsewhere])
