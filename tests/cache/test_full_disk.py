"""Saving to a full disk: an `OSError`, and the earlier files remain."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk
from measured_heads import measured
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, plot
from hf_diffkv.cache.io import TENSORS_NAME
from hf_diffkv.cache.report import LayerReport, MemoryReport
from hf_diffkv.calibration.queries import keep_queries, moments_on
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.records import RunFolder
from hf_diffkv.evaluation.tasks import Document
from hf_diffkv.heads.lookup import FOLDER_VARIABLE, keep
from hf_diffkv.replacing import save_tensors, save_text
from hf_diffkv.running import side_by_side


def measurements(model: PreTrainedModel, folder: Path) -> None:
    keep(measured(model))


def moments(model: PreTrainedModel, folder: Path) -> None:
    keep_queries(moments_on(model, [Document("a", tuple(range(3, 63)))]))


def configuration(model: PreTrainedModel, folder: Path) -> None:
    DiffKVConfig().save_pretrained(folder)


def cache(model: PreTrainedModel, folder: Path) -> None:
    filled = DiffKVCache(model, DiffKVConfig.lossless())
    model.generate(torch.arange(3, 43)[None], past_key_values=filled, max_new_tokens=1)
    filled.save_pretrained(folder, model)


@pytest.mark.parametrize("save", [measurements, moments, configuration, cache])
def test_files_of_before_stay(
    save: Callable[[PreTrainedModel, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model = tiny_model("llama")
    save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before
    with full_disk(), pytest.raises(OSError, match="File too large"):
        save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save(model, tmp_path)


def test_the_file_without_room_is_named(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match=f"cannot write {tmp_path / TENSORS_NAME}: .*File too large"):
        cache(tiny_model("llama"), tmp_path)


def picture(model: PreTrainedModel, folder: Path) -> None:
    layers = (LayerReport(0, (1,), (1,), (1,), (1,)),)
    plot.levels(MemoryReport(1, 1, 0, 0, {}, layers, 1)).save(folder / "levels.png")


def settings(model: PreTrainedModel, folder: Path) -> None:
    RunFolder(folder, {"model": "m" * 100})


@pytest.mark.parametrize("save", [picture, settings])
def test_nothing_half_written(save: Callable[[PreTrainedModel | None, Path], None], tmp_path: Path) -> None:
    with full_disk(), pytest.raises((OSError, EvaluationError), match="File too large"):
        save(None, tmp_path)
    assert not list(tmp_path.iterdir())
    save(None, tmp_path)


def test_text_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    save_text("before ü", path)
    with full_disk(), pytest.raises(OSError, match=f"File too large: '{path}'") as raised:
        save_text("after" * 100, path)
    assert raised.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == "before ü" and len(list(tmp_path.iterdir())) == 1


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        save_text("text", path)
        assert os.read(reader, 10) == b"text" and path.is_fifo()
    finally:
        os.close(reader)


def test_figures_of_a_run_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a run reports this, and leaves no damaged file for the process that waits for it."""

    def fail(job: Any) -> None:
        raise ValueError("an error " * 10)

    monkeypatch.setattr(side_by_side, "execute", fail)
    job = side_by_side.Job(side_by_side.DIFFKV, "tiny-lm", ["text"], 1, {}, "auto", "cpu", 0, False)
    (tmp_path / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    with full_disk(), pytest.raises(SystemExit, match="cannot be stored: .*run.json.*set TMPDIR"):
        side_by_side._main(str(tmp_path / "job.json"), str(tmp_path / "run.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_the_file_is_named(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="cannot write .*sums.safetensors: .*File too large"):
        save_tensors({"0": torch.zeros(100)}, tmp_path / "sums.safetensors")
    assert not list(tmp_path.iterdir())
