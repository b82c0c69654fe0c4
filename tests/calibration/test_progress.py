"""Measuring heads: what is said meanwhile, and how an interrupted run goes on."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_diffkv.calibration import heads as heads_module
from hf_diffkv.calibration import progress as progress_module
from hf_diffkv.calibration import queries as queries_module
from hf_diffkv.calibration.documents import POSITIONS
from hf_diffkv.calibration.heads import Measured, measure
from hf_diffkv.calibration.progress import Progress
from hf_diffkv.calibration.queries import measure_queries, moments_on
from hf_diffkv.evaluation.tasks import Document
from hf_diffkv.heads import lookup
from tests.tiny_models import tiny_model

LAYERS = 3


def document(seed: int, tokens: int = 120) -> Document:
    ids = torch.randint(3, 128, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Document(f"random-{seed}", tuple(ids[:-10]), continuation=tuple(ids[-10:]), extra={POSITIONS: [1, 4, 9]})


DOCUMENTS = [document(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=LAYERS, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def whole(model: PreTrainedModel) -> Measured:
    return measure(model, DOCUMENTS, quiet=True)


class Counted:
    """Measures documents, and is interrupted at one of them."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.original, self.calls, self.interrupted_at = heads_module.Following, 0, interrupted_at

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        return self.original(*arguments)


def interrupted(model: PreTrainedModel, folder: Path, at: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads_module, "Following", Counted(at))
    with pytest.raises(KeyboardInterrupt):
        measure(model, DOCUMENTS, folder, quiet=True)
    patch.undo()


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupted_run_goes_on_with_the_next_document(
    model: PreTrainedModel, whole: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    interrupted(model, tmp_path, at, monkeypatch)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    rest = Counted()
    monkeypatch.setattr(heads_module, "Following", rest)
    again = measure(model, DOCUMENTS, tmp_path, quiet=True)
    assert rest.calls == len(DOCUMENTS) - (at - 1)
    assert again.sensitivity == whole.sensitivity
    for mine, expected in zip(again.queries.triangles, whole.queries.triangles):
        assert torch.equal(mine, expected)
    # nothing is left to do
    assert measure(model, DOCUMENTS, tmp_path, quiet=True).sensitivity == whole.sensitivity
    assert rest.calls == len(DOCUMENTS) - (at - 1)


def test_moments_are_those_of_prompts_alone(model: PreTrainedModel, whole: Measured) -> None:
    alone = moments_on(model, DOCUMENTS)
    assert alone.documents_digest == whole.queries.documents_digest and alone.shapes == whole.queries.shapes
    assert all(torch.equal(mine, other) for mine, other in zip(alone.triangles, whole.queries.triangles))


def test_sums_of_other_documents_are_dropped(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(model, DOCUMENTS[:2], tmp_path, quiet=True)
    calls = []
    original = queries_module._mean
    monkeypatch.setattr(queries_module, "_mean", lambda layer: calls.append(layer) or original(layer))
    others = measure(model, DOCUMENTS[1:3], tmp_path, quiet=True)
    assert len(calls) == 2 * LAYERS
    expected = moments_on(model, DOCUMENTS[1:3])
    assert all(torch.equal(mine, other) for mine, other in zip(others.queries.triangles, expected.triangles))


def test_damaged_sums_are_measured_again(model: PreTrainedModel, whole: Measured, tmp_path: Path) -> None:
    measure(model, DOCUMENTS, tmp_path, quiet=True)
    (path,) = tmp_path.rglob("queries.safetensors")
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-9]):
        path.write_bytes(damaged)
        again = measure(model, DOCUMENTS, tmp_path, quiet=True)
        assert all(torch.equal(mine, other) for mine, other in zip(again.queries.triangles, whole.queries.triangles))
    assert path.read_bytes() == content


def test_a_line_for_each_document_where_there_is_no_terminal(
    model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(model, DOCUMENTS)
    output = capsys.readouterr()
    first, *lines = output.err.strip().splitlines()
    assert output.out == "" and len(lines) == len(DOCUMENTS)
    assert re.fullmatch(r"4 documents, about [\d.]+ s", first)
    for index, line in enumerate(lines[:-1]):
        left = f"{3 - index} document{'s' if index < 2 else ''} left, about"
        assert re.fullmatch(rf"document {index + 1} of 4 \(random-{index}\) took [\d.]+ s; {left} [\d.]+ s", line)
    assert re.fullmatch(r"document 4 of 4 \(random-3\) took [\d.]+ s; all are measured", lines[-1])


@pytest.mark.parametrize(
    ("at", "said"),
    [(3, "2 of 4 documents were measured before"), (2, "1 of 4 documents was measured before")],
)
def test_it_is_said_what_is_taken_over(
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: int,
    said: str,
) -> None:
    interrupted(model, tmp_path, at, monkeypatch)
    assert capsys.readouterr().err == ""
    measure(model, DOCUMENTS, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == said and lines[-1].startswith("document 4 of 4 (random-3)")
    assert len(lines) == 2 + len(DOCUMENTS) - (at - 1)
    measure(model, DOCUMENTS, tmp_path)
    assert capsys.readouterr().err == ""


def test_time_left_is_proportional_to_the_work_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    with Progress(3, 30.0) as progress:
        for name, seconds in (("one", 125.0), ("two", 3600.0), ("three", 4.0)):
            progress.begin(name)
            now[0] += seconds
            progress.advance(10.0)
            progress.estimate()
            progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "3 documents, about 4 min 10 s",
        "document 1 of 3 (one) took 2 min 05 s; 2 documents left, about 4 min 10 s",
        "document 2 of 3 (two) took 1 h 00 min; 1 document left, about 31 min 02 s",
        "document 3 of 3 (three) took 4.0 s; all are measured",
    ]


def test_nothing_advises_to_measure_while_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "user"))
    tiny_model("llama").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    monkeypatch.setattr(queries_module, "documents_for", lambda *arguments: DOCUMENTS)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        measure(model, DOCUMENTS, quiet=True)
        measure_queries(model, None)
    assert caplog.records == []
