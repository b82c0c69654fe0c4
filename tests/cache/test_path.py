"""Through how many files a prompt's keys go, from the attention function to pages."""

from __future__ import annotations

import os
import sys
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
# one of them ends the turn of the forward (cache/turns.py)
MOST_FILES = 20


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "reference"])
@pytest.mark.parametrize("config", [DiffKVConfig.preset("balanced"), DiffKVConfig(window=8, alpha_low=0.02)])
def test_a_prompts_keys_go_through_few_files(backend: str, config: DiffKVConfig) -> None:
    model = tiny_model("llama", "diffkv")
    ids, mask = ragged_prompts((70, 60))
    entered: set[str] = set()
    depth = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        code = frame.f_code
        if code is diffkv_attention.__code__:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and depth and code.co_filename.startswith(PACKAGE):
            entered.add(os.path.relpath(code.co_filename, PACKAGE))

    with use_backend(backend), torch.no_grad():
        # what is imported or made once does not count
        model(ids, attention_mask=mask, **passing(DiffKVCache(model.config, config)))
        cache = DiffKVCache(model.config, config)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            model(ids, attention_mask=mask, **passing(cache))
        finally:
            sys.setprofile(before)
    assert {"cache/attention.py", "store/prompt.py", "pages/rows.py"} <= entered
    assert len(entered) <= MOST_FILES, sorted(entered)
