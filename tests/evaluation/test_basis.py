"""A record counts for a run only where everything that decides its figures is the run's."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_diffkv_evaluation.fresh import fresh
from invented import GOOD, MODEL, TASK, Invented
from measured_heads import measured
from transformers import AutoModelForCausalLM

from hf_diffkv import DiffKVConfig
from hf_diffkv.cli import main
from hf_diffkv.evaluation import basis
from hf_diffkv.evaluation.basis import bases_of
from hf_diffkv.evaluation.methods import METHODS, Method, get_method
from hf_diffkv.evaluation.records import Record, RunFolder
from hf_diffkv.evaluation.runner import documents_of, run
from hf_diffkv.evaluation.tasks import get_task
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.heads import lookup
from hf_diffkv.heads.weights import model_digest
from hf_diffkv.running.models import TINY_LM


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM)


def of(model: Any, label: str) -> dict[str, Any]:
    return bases_of(model, [get_method(label)])[label]


def go(path: Path, model: Any, *labels: str) -> list[tuple[str, str]]:
    """Runs methods and returns the pairs of method and document that were measured."""
    Invented.measured.clear()
    task, methods = get_task(TASK), [get_method(label) for label in labels]
    run(model, methods, [(task, documents_of(task, Source(None, 1)))], RunFolder(path, {}), quiet=True)
    return list(Invented.measured)


def test_calibrating_changes_the_basis_of_what_it_decides(model: Any) -> None:
    before = {label: of(model, label) for label in ("diffkv", "diffkv:small", "diffkv:K8V4", "dense")}
    assert before == {label: of(model, label) for label in before}
    lookup.keep(measured(model))
    after = {label: of(model, label) for label in before}
    assert {label for label in before if before[label] != after[label]} == {"diffkv", "diffkv:small"}
    queries = lookup.queries_path(model_digest(model))
    queries.write_bytes(b"moments")
    assert of(model, "diffkv:K8V4") != after["diffkv:K8V4"]


def test_a_saved_configuration_of_one_name_counts_by_its_content(model: Any, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    DiffKVConfig(window=16).save_pretrained(saved)
    before = of(model, f"diffkv:config={saved}")
    DiffKVConfig(window=32).save_pretrained(saved)
    assert of(model, f"diffkv:config={saved}") != before


@pytest.mark.usefixtures("invented")
def test_what_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "run"
    both = [("dense", f"{TASK}-0"), (GOOD, f"{TASK}-0")]
    assert go(first, MODEL, "dense", GOOD) == both and go(first, MODEL, "dense", GOOD) == []
    other = copy.deepcopy(MODEL)
    torch.nn.init.zeros_(other.weight)
    assert go(first, other, "dense", GOOD) == both and go(first, other, "dense", GOOD) == []
    half = copy.deepcopy(other)
    half.dtype = torch.bfloat16
    assert go(first, half, "dense", GOOD) == both
    monkeypatch.setattr(basis, "__version__", "99")
    assert go(first, half, "dense", GOOD) == both
    monkeypatch.setattr(basis, "installed", lambda names: {name: "77" for name in names})
    assert go(first, half, "dense", GOOD) == both and go(first, half, "dense", GOOD) == []


@pytest.mark.usefixtures("invented")
def test_records_of_earlier_versions_are_read_and_not_taken(tmp_path: Path) -> None:
    go(tmp_path, MODEL, "dense", GOOD)
    path = RunFolder(tmp_path, {}).path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("basis")["code"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = RunFolder(tmp_path, {}).records()
    assert [record.basis for record in records] == [{}, {}]
    assert fresh(records, bases_of(MODEL, [get_method("dense"), get_method(GOOD)])) == []
    assert len(go(tmp_path, MODEL, "dense", GOOD)) == 2


@pytest.mark.usefixtures("invented")
def test_weights_that_cannot_be_told_are_measured_again(tmp_path: Path) -> None:
    meta = copy.deepcopy(MODEL).to("meta")
    assert go(tmp_path, meta, "dense") == go(tmp_path, meta, "dense") != []


class Elsewhere(Method):
    environment = SimpleNamespace(name="elsewhere")

    def new_cache(self, model: Any) -> Any:
        raise NotImplementedError


def test_records_of_another_environment_depend_on_code_and_dtype(model: Any, names: None) -> None:
    METHODS.add("elsewhere")(lambda options: Elsewhere())
    assert "transformers" in of(model, "dense")["packages"] and of(model, "dense")["device"] == "cpu"
    record = Record("elsewhere", "text", "a", "b", basis={"code": "1", "dtype": "float32", "weights": "x"})
    bases = {record.method: {"code": "1", "dtype": "float32", "weights": "y", "packages": {}}}
    assert fresh([record], bases) == [record]
    assert fresh([dataclasses.replace(record, basis={})], bases) == []


def test_evaluate_after_calibrate_shows_new_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a command before and after calibration; a method that is not named again is left out of the table."""
    evaluate = ["evaluate", "--model", "tiny-lm", "--tasks", "text", "--documents", "1", "--length", "300", "--quiet"]
    evaluate += ["--output", str(tmp_path / "run")]
    assert main([*evaluate, "--methods", "diffkv,diffkv:K8V4,diffkv:small"]) == 0
    records = {record.method: record for record in RunFolder(tmp_path / "run", settings(tmp_path)).records()}
    lookup.keep(measured(AutoModelForCausalLM.from_pretrained(TINY_LM)))
    capsys.readouterr()
    assert main([each for each in evaluate if each != "--quiet"] + ["--methods", "diffkv,diffkv:K8V4"]) == 0
    again = {record.method: record for record in RunFolder(tmp_path / "run", settings(tmp_path)).records()}
    assert again["diffkv"].bytes < records["diffkv"].bytes and again["diffkv:K8V4"] == records["diffkv:K8V4"]
    printed = capsys.readouterr()
    assert "| diffkv:small |" not in printed.out and "| diffkv:K8V4 |" in printed.out
    assert "another version: diffkv:small. Name them in --methods" in " ".join(printed.err.split())


def settings(path: Path) -> dict[str, Any]:
    return json.loads((path / "run" / "run.json").read_text())
