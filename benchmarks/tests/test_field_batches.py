"""Field task cases that are answered together."""

from __future__ import annotations

import json
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

FACTS = (CHECKOUT / "examples" / "prompts" / "recall.txt").read_text()


@pytest.fixture(scope="module")
def tiny_lm() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def code() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


@pytest.fixture
def measuring(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("field_tasks.measuring")


@pytest.fixture
def cases(measuring: ModuleType, code: Any) -> list[Any]:
    """Prompts of different lengths, whose answers end at different lengths."""
    # answers are four digits
    ends, made = tuple(code("\n4").input_ids), []
    for number, (length, key) in enumerate(((900, "sky"), (500, "oak"), (700, "ice"), (300, "sky"))):
        ids = tuple(code(f"{FACTS[:length]}\n?{key}=").input_ids)
        made.append(measuring.Case("vt", f"200/{number}", ids, 24, ends, {"outputs": ["1"]}))
    return made


def test_batches(script: Callable[[str], ModuleType], cases: list[Any]) -> None:
    batches_of, case_type = script("field_tasks.batches").batches_of, type(cases[0])
    assert [[case.name for case in batch] for batch in batches_of(cases, 3)] == [["200/3", "200/1", "200/2"], ["200/0"]]
    longer = [case_type("vt", f"long {n}", cases[n].ids, 99, cases[n].ends) for n in range(2)]
    later = [case_type("vt", f"later {n}", cases[n].ids, 24, cases[n].ends, {}, cases[0].ids) for n in range(2)]
    found = [[case.name for case in batch] for batch in batches_of([*later, *longer, *cases], 4)]
    assert found == [["200/3", "200/1", "200/2", "200/0"], ["long 1", "long 0"], ["later 1"], ["later 0"]]


@pytest.mark.parametrize("label", ["dense", "diffkv", "diffkv:lossless"])
def test_answers_of_a_batch(script: Callable[[str], ModuleType], tiny_lm: Any, cases: list[Any], label: str) -> None:
    """They equal those of each case alone, and each gets its share of the batch's bytes."""
    method, per_token = get_method(label), 2 * 4 * sum(_widths(tiny_lm))
    found = script("field_tasks.batches").answer_together(tiny_lm, method, cases, per_token)
    longest = max(len(case.ids) for case in cases) + max(len(answer.ids) for answer in found) - 1
    for case, answer in zip(cases, found):
        session = Session(tiny_lm, method)
        written = [int(session.forward(case.ids)[-1].argmax())]
        while len(written) < case.limit and written[-1] not in case.ends:
            written.append(int(session.forward([written[-1]])[-1].argmax()))
        assert list(answer.ids) == written
        assert (answer.batch, answer.shared) == (len(cases), False)
        assert answer.dense_bytes == per_token * longest
        assert answer.held.bytes == answer.dense_bytes if label == "dense" else 0 < answer.held.bytes
    assert len({len(answer.ids) for answer in found}) > 1
    if label == "diffkv":
        assert found[0].held.bytes < 0.7 * found[0].dense_bytes


def _widths(model: Any) -> list[int]:
    config = model.config
    return [config.num_key_value_heads * config.head_dim] * config.num_hidden_layers


def test_a_run_in_batches_continues(
    measuring: ModuleType, tiny_lm: Any, code: Any, cases: list[Any], tmp_path: Path
) -> None:
    """Later runs skip what is done."""
    records, methods = measuring.Records(tmp_path), [get_method("dense"), get_method("diffkv")]
    measuring.measure(tiny_lm, code, methods, cases[:1], records, quiet=True)
    measuring.measure(tiny_lm, code, methods, cases, records, batch=4, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "vt.jsonl").read_text().splitlines()]
    assert [(line["document"], line["method"]) for line in lines] == [
        ("200/0", "dense"),
        ("200/0", "diffkv"),
        *((f"200/{number}", method) for method in ("dense", "diffkv") for number in (3, 1, 2)),
    ]
    assert [line["details"]["batch"] for line in lines] == [1, 1, *[3] * 6]
    measuring.measure(tiny_lm, code, methods, cases, records, batch=4, quiet=True)
    assert len((tmp_path / "vt.jsonl").read_text().splitlines()) == len(lines)


def test_a_batch_that_fails(
    measuring: ModuleType, tiny_lm: Any, code: Any, cases: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = get_method("diffkv")
    monkeypatch.setattr(type(method), "new_cache", lambda *ignored: 1 / 0)
    measuring.measure(tiny_lm, code, [method], cases, measuring.Records(tmp_path), batch=2, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "vt.jsonl").read_text().splitlines()]
    assert sorted(line["document"] for line in lines) == [case.name for case in cases]
    assert {line["error"] for line in lines} == {"ZeroDivisionError: division by zero"}
