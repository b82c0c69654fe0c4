"""The example with the callback, at tiny size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_with_callback

    entries = train_with_callback.train(tmp_path, steps=2, length=96, prompts=2, every_steps=1)
    assert [entry["step"] for entry in entries] == [1, 2]
    assert all(0 <= entry["eval_diffkv_agreement"] <= 1 and entry["eval_diffkv_bytes"] > 0 for entry in entries)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("train_with_callback", "tiny_lm_data"):
        sys.modules.pop(name, None)
