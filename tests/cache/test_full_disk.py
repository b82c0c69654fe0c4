"""Saving on a full disk: an `OSError`, and the files of before stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from measured_heads import measured
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.calibration.queries import keep_queries, moments_on
from hf_diffkv.evaluation.tasks import Document
from hf_diffkv.heads.lookup import FOLDER_VARIABLE, keep
from hf_diffkv.replacing import save_tensors


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


def test_the_file_is_named(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="cannot write .*sums.safetensors: .*File too large"):
        save_tensors({"0": torch.zeros(100)}, tmp_path / "sums.safetensors")
    assert not list(tmp_path.iterdir())
