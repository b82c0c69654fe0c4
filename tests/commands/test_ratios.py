"""--ratio and --preset: every command that runs a model takes them, and means the same by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measured_heads import measured
from transformers import AutoModelForCausalLM

from hf_diffkv import DiffKVConfig
from hf_diffkv.cli import main
from hf_diffkv.commands import load
from hf_diffkv.heads import lookup
from hf_diffkv.running.models import TINY_LM

TEXT = "@sky=0400\n" * 20
RUNNING = ("generate", "chat", "plan", "inspect", "verify", "bench", "serve", "demo")
# below what one precision for all heads can have
RATIO = 0.2


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


@pytest.mark.parametrize("name", RUNNING)
def test_every_command_that_runs_a_model_takes_both(name: str) -> None:
    options = {option for parameter in load(name).params for option in parameter.opts}
    assert {"--preset", "--ratio"} <= options


def test_the_ratio_is_that_of_the_library(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected = DiffKVConfig.for_model(model, target_ratio=RATIO).to_dict()
    assert expected["head_precisions"] is not None
    for arguments in (
        ["inspect", "--model", "tiny-lm"],
        ["inspect", TEXT, "--model", "tiny-lm"],
        ["generate", TEXT, "--model", "tiny-lm", "--no-compare", "--max-new-tokens", "2"],
    ):
        assert main([*arguments, "--ratio", str(RATIO), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"] == expected


def test_bench_gives_it_to_diffkv(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench = ["bench", "--model", "tiny-lm", "--context", "200", "--steps", "2", "--json", "--quiet"]
    assert main([*bench, "--caches", "diffkv,diffkv:K8V4", "--ratio", str(RATIO)]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["caches"]]
    assert names == ["dense", "diffkv:target_ratio=0.2", "diffkv:K8V4"]
    assert main([*bench, "--caches", "dense", "--preset", "small"]) == 2
    assert "--preset is for the cache 'diffkv', which is not among --caches; add it." in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", TEXT, "--model", "tiny-lm", "--no-compare"],
        ["chat", "--model", "tiny-lm", "--plain"],
        ["plan", "--model", "tiny-lm", "--memory", "1GB"],
        ["inspect", "--model", "tiny-lm"],
        ["verify", "--model", "tiny-lm"],
        ["serve", "tiny-lm"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_ratio_that_cannot_be_had_is_said_before_the_weights_are_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of tiny-lm are not measured here."""
    monkeypatch.setattr("hf_diffkv.running.models.load_model", lambda *args: pytest.fail("loads the weights"))
    assert main([*arguments, "--ratio", str(RATIO)]) == 2
    assert "--ratio 0.2 is below what K4V2 needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ratio", "2"], "'2' is not a ratio; give a number above 0 and at most 1, such as 0.23."),
        (["--ratio", "a"], "'a' is not a ratio"),
        (["--ratio", "0.3", "--preset", "small"], "--ratio and --preset cannot be combined; leave one out."),
        (["--ratio", "0.3", "--lossless"], "--lossless and --ratio cannot be combined; leave one out."),
        (["--ratio", "0.3", "--low", "K4V2"], "--ratio 0.3 chooses bits and levels; leave --low out."),
    ],
)
def test_what_does_not_go_with_it(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", "tiny-lm", *options]) == 2
    assert said in capsys.readouterr().err
