"""Loss after long prompts: the rows equal those of caches that read the prompt themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session
from hf_diffkv.running.models import CHECKOUT, TINY_LM

PROMPT = (CHECKOUT / "examples" / "prompts" / "recall.txt").read_text()
FURTHER = 40
# the last one keeps sums, which need the prompt's attention
METHODS = ("diffkv:lossless", "diffkv:K4V2", "diffkv:paper")


@pytest.fixture
def long_text(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("long_text")


@pytest.mark.parametrize("length", [300, 500])
def test_rows(long_text: ModuleType, length: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    ids = tuple(AutoTokenizer.from_pretrained(TINY_LM)(PROMPT).input_ids[: 500 + FURTHER])
    with torch.no_grad():
        found = list(long_text.measure(model, ids, [300, 500], list(METHODS), FURTHER))
    assert [(row["length"], row["method"]) for row in found] == [(n, label) for n in (300, 500) for label in METHODS]
    rows = {row["method"]: row for row in found if row["length"] == length}
    following = ids[length : length + FURTHER]

    def logits(label: str) -> tuple[Any, int]:
        session = Session(model, get_method(label))
        session.forward(ids[:length])
        held = session.held().bytes
        return session.forward(following, keep=FURTHER).double(), held

    dense = logits("dense")[0].log_softmax(-1)
    for label in METHODS:
        mine, held = logits(label)
        kl = (dense.exp() * (dense - mine.log_softmax(-1))).sum(-1)
        row = rows[label]
        assert row["bytes"] == held
        assert row["kl"] == pytest.approx(float(kl.mean()), rel=0.02, abs=1e-6)
        assert row["kl_99.9%"] == pytest.approx(float(kl.quantile(0.999)), rel=0.02, abs=1e-6)
        assert row["same"] == pytest.approx(float((dense.argmax(-1) == mine.argmax(-1)).double().mean()), abs=0.03)
        nll = -dense[range(FURTHER - 1), list(following[1:])].mean()
        assert row["perplexity"] == pytest.approx(float(nll.exp()), rel=1e-3)
    assert rows["diffkv:lossless"]["kl"] < 1e-4 < rows["diffkv:K4V2"]["kl"]


def test_a_run(long_text: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.json"
    options = ["--model", str(TINY_LM), "--lengths", "100", "--methods", "diffkv", "--further", "8", "--text", "text"]
    monkeypatch.setattr(sys, "argv", ["long_text.py", *options, "--output", str(path)])
    long_text.run(long_text.__doc__, long_text.measure, long_text.LENGTHS, long_text.METHODS)
    content = json.loads(path.read_text())
    assert [row["length"] for row in content["rows"]] == [100] and content["environment"]["torch"]
    assert len(long_text.modules()) > 20


def test_essays(long_text: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(map(str, range(90_000)))
    monkeypatch.setattr(long_text.wheels, "ruler_texts", {"PaulGrahamEssays": {"text": text}}.__getitem__)
    parts = long_text.essays()
    assert "".join(parts) == text[: len(parts) * long_text.ESSAYS] and len(parts) == len(text) // long_text.ESSAYS
    document = long_text.document_of("essays", AutoTokenizer.from_pretrained(TINY_LM), 0, 1000, 100)
    assert (len(document.context), len(document.continuation)) == (1000, 100)
