"""PyTorch's builds for CPUs come without Triton; there everything that CPUs run does without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# every Python process imports it first, also those that a command starts
HIDES = """
import importlib.metadata, sys
sys.modules["triton"] = None
given = importlib.metadata.version
def version(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return given(name)
importlib.metadata.version = version
"""
# native code where it is there, and the reference
CACHES = """
import torch
import hf_diffkv
from hf_diffkv.config.presets import PRESETS
from hf_diffkv.ops import backend
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("examples/models/tiny-lm")
ids = torch.arange(300)[None] % 90 + 3
for name in ("native", "reference"):
    for preset in PRESETS:
        cache = hf_diffkv.DiffKVCache(model, preset)
        with backend.use_backend(name):
            assert model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False).shape[1] > 300
        assert cache.memory().ratio < 1
print(sorted(name for name in __import__("sys").modules if name.startswith("triton")))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    paths = [str(tmp_path), str(ROOT), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_versions_say_that_it_is_missing(environment: dict[str, str]) -> None:
    assert json.loads(run(environment, "-m", "hf_diffkv", "env", "--json"))["triton"] == "not installed"


def test_every_preset_runs(environment: dict[str, str]) -> None:
    assert run(environment, "-c", CACHES).strip() == "['triton']"


@pytest.mark.slow
def test_the_command_runs(environment: dict[str, str], tmp_path: Path) -> None:
    options = ["--prompt-file", "examples/prompts/recall.txt", "--max-new-tokens", "4", "--quiet"]
    printed = run(environment, "-m", "hf_diffkv", "generate", "--model", "tiny-lm", *options)
    # what the last line of the prompt asks for
    assert printed.strip() == "9082"
