"""Counts the files that keys pass through, from the attention function to pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from native_code import needs_native
from tiny_models import ragged_prompts, tiny_model

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.attention import diffkv_attention
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import use_backend

PACKAGE = str(Path(hf_diffkv.__file__).parent)
# one of them ends the forward's turn (cache/turns.py)
MOST_OF_A_PROMPT = 17
# for one layer's token, in native code and in PyTorch
MOST_OF_A_STEP = {"native": 7, "reference": 11}
BACKENDS = [pytest.param("native", marks=needs_native), "reference"]
CONFIGS = [DiffKVConfig.preset("balanced"), DiffKVConfig(window=8, alpha_low=0.02)]


def files_entered(call: Callable[[], object], layers: int) -> set[str]:
    """Runs `call`; returns the package's files entered within the attention function of the first `layers`."""
    entered: set[str] = set()
    depth = calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth, calls
        code = frame.f_code
        if code is diffkv_attention.__code__:
            depth += {"call": 1, "return": -1}.get(event, 0)
            calls += event == "call"
        if event == "call" and depth and calls <= layers and code.co_filename.startswith(PACKAGE):
            entered.add(os.path.relpath(code.co_filename, PACKAGE))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_prompts_keys_go_through_few_files(backend: str, config: DiffKVConfig) -> None:
    model = tiny_model("llama", "diffkv")
    ids, mask = ragged_prompts((70, 60))
    with use_backend(backend), torch.no_grad():
        # what is imported or built only once does not count
        model(ids, attention_mask=mask, **passing(DiffKVCache(model.config, config)))
        cache = DiffKVCache(model.config, config)
        entered = files_entered(lambda: model(ids, attention_mask=mask, **passing(cache)), len(cache.layers))
    assert {"cache/attention.py", "store/prompt.py", "pages/rows.py"} <= entered
    assert len(entered) <= MOST_OF_A_PROMPT, sorted(entered)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_steps_keys_go_through_few_files(backend: str, config: DiffKVConfig) -> None:
    model = tiny_model("llama", "diffkv")
    ids, mask = ragged_prompts((70, 60))
    cache = DiffKVCache(model.config, config)

    def step() -> None:
        nonlocal mask
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        model(ids[:, :1], attention_mask=mask, **passing(cache))

    with use_backend(backend), torch.no_grad():
        model(ids, attention_mask=mask, **passing(cache))
        # the first step reads the device and makes the records of rows
        step()
        entered = files_entered(step, 1)
    assert {"cache/attention.py", "cache/layer.py", "store/decode.py"} <= entered
    assert len(entered) <= MOST_OF_A_STEP[backend], sorted(entered)
