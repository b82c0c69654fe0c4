"""Short names of models: what they stand for, with and without a copy on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from hf_diffkv.cli import main
from hf_diffkv.running import models
from hf_diffkv.running.models import resolve_model

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the models' copies; there are none."""
    monkeypatch.setattr(models, "MODELS_FOLDER", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def test_without_a_copy_a_short_name_is_its_hub_id() -> None:
    assert resolve_model("smollm2") == resolve_model(SMOLLM2) == SMOLLM2
    assert resolve_model("gemma3-270m") == "google/gemma-3-270m"


def test_a_copy_comes_first(folder: Path) -> None:
    (folder / "smollm2").mkdir(parents=True)
    assert resolve_model("smollm2") == SMOLLM2, "an empty folder is no model"
    (folder / "smollm2" / "config.json").touch()
    assert resolve_model("smollm2") == resolve_model(SMOLLM2) == str(folder / "smollm2")
    assert resolve_model("gemma3-270m") == "google/gemma-3-270m"


def test_tiny_lm_is_the_one_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert AutoConfig.from_pretrained(resolve_model("tiny-lm")).num_key_value_heads == 2
    monkeypatch.setattr(models, "TINY_LM", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="comes only with a checkout"):
        resolve_model("tiny-lm")


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "Owner/smolm2"])
def test_other_names_are_left_alone(name: str) -> None:
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["./no/such/folder", "/tiny-ml", "~/models/x", "../x"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no folder {name!r}"):
        resolve_model(name)


def test_a_folder_is_left_alone(tmp_path: Path) -> None:
    for name in ("smollm2", "smolm2", "tiny-lm"):
        (tmp_path / name).mkdir()
        assert resolve_model(name) == name
    assert resolve_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name, meant", [("SmolLM2", "smollm2"), ("tinylm", "tiny-lm"), ("gemma3-270", "gemma3-270m")])
def test_a_misspelt_short_name(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is neither a folder nor a known model; did you mean '{meant}'"):
        resolve_model(name)


def test_weights_that_are_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models.TINY_LM, broken)
    os.truncate(broken / "model.safetensors", 100_000)
    for command in (["verify"], ["generate", "a", "--no-compare"]):
        assert main([*command, "--model", str(broken), "--quiet"]) != 0
        *_, line = capsys.readouterr().err.splitlines()
        assert f"a file of the weights in {broken} is damaged or truncated" in line
