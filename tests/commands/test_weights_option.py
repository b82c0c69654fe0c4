"""--weights: commands that run a model can quantise its weights with bitsandbytes."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_diffkv.cli import main
from hf_diffkv.commands import env, load
from hf_diffkv.evaluation import environment
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.running.models import TINY_LM, load_model

RUNNING = ("generate", "chat", "inspect", "verify", "bench", "serve", "evaluate", "calibrate")


@pytest.mark.parametrize("name", RUNNING)
def test_every_command_that_loads_a_model_takes_it(name: str) -> None:
    assert "--weights" in {option for parameter in load(name).params for option in parameter.opts}


@pytest.mark.parametrize(("weights", "kind", "bits"), [("4bit", "Linear4bit", 4), ("8bit", "Linear8bitLt", 8)])
def test_linear_layers_have_these_bits(weights: str, kind: str, bits: int) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY_LM)
    model = load_model("tiny-lm", device="cpu", weights=weights)
    layer, exact = model.model.layers[0].mlp.up_proj, plain.model.layers[0].mlp.up_proj.weight
    assert type(layer).__name__ == kind and 8 * layer.weight.nbytes == bits * exact.numel()
    if bits == 4:
        assert layer.weight.quant_type == "nf4"
    assert torch.equal(model.model.norm.weight.float(), plain.model.norm.weight.float())


def test_generate_runs_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "@oak=5305\n" * 20, "--model", "tiny-lm", "--max-new-tokens", "2", "--json"]
    assert main([*arguments, "--weights", "4bit", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else original(name, *rest)
    )
    with pytest.raises(EvaluationError, match="pip install bitsandbytes"):
        load_model("tiny-lm", device="cpu", weights="4bit")


@pytest.mark.parametrize("alone", [["--no-compare"], []])
def test_generate_says_it_in_a_line(alone: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd) -> None:
    """One run is in this process, two are in others, which import this `sitecustomize`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'bitsandbytes' else find(name, *rest)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else original(name, *rest)
    )
    arguments = ["generate", "?oak=", "--model", "tiny-lm", "--weights", "4bit", "--device", "cpu", "--quiet", *alone]
    assert main(arguments) == 1
    said = capfd.readouterr().err
    assert said == "hf-diffkv: DiffKV: weights='4bit' needs bitsandbytes: pip install bitsandbytes\n"


def test_weights_that_are_quantised_already(tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    load_model("tiny-lm", device="cpu", weights="4bit").save_pretrained(folder)
    with pytest.raises(EvaluationError, match="already quantised; leave weights='4bit' out"):
        load_model(str(folder), device="cpu", weights="4bit")


@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        ("fpu avx512dq avx512_bf16 fsrm", "--weights 4bit"),
        ("fpu avx512dq avx2", None),
        ("fpu avx2", "--dtype float32"),
    ],
)
@pytest.mark.parametrize("found", [[], ["NVIDIA H100"]])
def test_env_advises_what_is_faster_on_this_processor(
    found: list[str],
    flags: str,
    advised: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: a processor\nflags\t\t: {flags}\n")
    monkeypatch.setattr(env, "CPU_INFO", info)
    monkeypatch.setattr(environment, "gpus", lambda: found)
    assert main(["env"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("advice:")]
    assert len(lines) == (advised is not None and not found)
    assert all(advised in line for line in lines)
