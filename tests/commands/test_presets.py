"""Presets on the command line, for models whose heads were measured and for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measured_heads import measured
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_diffkv import DiffKVConfig
from hf_diffkv.cli import main
from hf_diffkv.commands.examples import prompt_for
from hf_diffkv.heads import lookup
from hf_diffkv.running.models import TINY_LM

TEXT = "@sky=0400\n" * 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(lookup, "_told", set())
    return tmp_path


@pytest.fixture
def model() -> Any:
    """tiny-lm, whose heads are taken for measured."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    lookup.keep(measured(model))
    return model


def config_in(printed: str) -> DiffKVConfig:
    return DiffKVConfig.from_dict(json.loads(printed)["config"])


def test_what_loads_the_weights_finds_what_its_heads_lose(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        "inspect": ["inspect", TEXT, "--json"],
        "generate": ["generate", TEXT, "--no-compare", "--max-new-tokens", "3", "--json"],
    }
    for arguments in commands.values():
        for options, fields in (([], {}), (["--preset", "small", "--window", "9"], {"preset": "small", "window": 9})):
            assert main([*arguments, "--model", "tiny-lm", *options]) == 0
            chosen = config_in(capsys.readouterr().out)
            assert chosen == DiffKVConfig.for_model(model, **fields) and chosen.head_precisions is not None


@pytest.mark.parametrize("weights", ["as they are", "packed", "none"])
def test_what_loads_no_weights_knows_them_by_their_files(
    weights: str, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = weights != "none"
    name = "tiny-lm" if weights == "as they are" else str(tmp_path / "model")
    if weights == "none":
        model.config.save_pretrained(name)
    elif weights == "packed":
        model.save_pretrained(name)
        # matrices as GPTQ and AWQ call them
        path = tmp_path / "model" / "model.safetensors"
        save_file({key.replace("proj.weight", "proj.qweight"): each for key, each in load_file(path).items()}, path)
    plan = ["plan", "--model", name, "--memory", "1GB", "--weights", "1MB"]
    for arguments in (["inspect", "--model", name], plan):
        for options, open_to_heads in ((["--preset", "small"], True), ([], True), (["--lossless"], False)):
            if arguments is plan and options == ["--lossless"]:
                options = ["--high", "K8V4"]
            assert main([*arguments, *options]) == 0
            said = " ".join(capsys.readouterr().err.split())
            assert ("is known only once its weights are on this machine" in said) == (open_to_heads and not here)
    assert main(["inspect", "--model", name, "--preset", "small", "--json"]) == 0
    expected = DiffKVConfig.for_model(model, preset="small") if here else DiffKVConfig.preset("small")
    assert config_in(capsys.readouterr().out) == expected and (expected.head_precisions is not None) == here


def test_the_example_is_one_where_the_cache_wins(capsys: pytest.CaptureFixture[str]) -> None:
    """The facts for tiny-lm, and the handbook for a model that chats."""
    assert main(["generate", "--example", "--model", "tiny-lm", "--max-new-tokens", "6", "--no-compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["runs"]["DiffKV"]
    assert found["text"].startswith("9082") and run["cache_bytes"] < 0.4 * run["dense_bytes"]
    assert prompt_for(True).endswith("What is the telephone number of the doctor?") and len(prompt_for(True)) > 5000
