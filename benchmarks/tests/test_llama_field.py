"""llama.cpp's caches on field tasks: records of its answers, with tiny-lm standing in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from llama_stand_in import DIM, HEADS, LAYERS, StandIn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.running import models
from hf_diffkv.running.models import CHECKOUT, TINY_LM

PROMPT = (CHECKOUT / "examples" / "prompts" / "recall.txt").read_text()
LIMIT = 12
# bytes of a token's keys and values; q8_0 uses 34 for 32 numbers
EXACT_BYTES, Q8_BYTES = LAYERS * HEADS * DIM * 4, LAYERS * HEADS * DIM * 2 // 32 * 34


@pytest.fixture
def by_llama_cpp(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, whose jobs run in this process with the stand-in stored in `program`."""
    module, worker = script("field_tasks.by_llama_cpp"), script("llama_field")
    monkeypatch.setattr(models, "MODELS_FOLDER", tmp_path)
    (tmp_path / "smollm2.gguf").touch()
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    module.program, module.jobs = StandIn(model), []

    def run_job(job: dict[str, Any]) -> None:
        module.jobs.append(job)
        worker.run(module.program, json.loads(json.dumps(job)))

    monkeypatch.setattr(module.ENVIRONMENT, "run_job", run_job)
    return module


@pytest.fixture
def cases(by_llama_cpp: ModuleType) -> list[Any]:
    """Two cases whose answers tiny-lm knows; the second continues an earlier turn."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    ids = tuple(tokenizer(PROMPT).input_ids)
    prompt = torch.tensor([ids])
    whole = by_llama_cpp.program.model.generate(prompt, max_new_tokens=LIMIT, do_sample=False, eos_token_id=None)
    text = tokenizer.decode(whole[0, len(ids) :])
    case = by_llama_cpp.Case("vt", "900/0", ids, LIMIT, (), {"outputs": [text.strip()]})
    return [case, dataclasses.replace(case, name="900/1", earlier=ids[:400], ids=ids[400:])]


def measure(module: ModuleType, cases: list[Any], folder: Path, *labels: str, **options: Any) -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    methods = [get_method(f"llama-cpp:{label}") for label in labels]
    records = module.Records(folder)
    module.measure_by_llama_cpp("smollm2", tokenizer, methods, cases, records, quiet=True, **options)
    return [json.loads(line) for line in (folder / "vt.jsonl").read_text().splitlines()]


def test_answers_and_bytes(by_llama_cpp: ModuleType, cases: list[Any], tmp_path: Path) -> None:
    found = measure(by_llama_cpp, cases, tmp_path / "records", "f16", "q8_0", threads=3)
    assert [(line["document"], line["method"]) for line in found] == [
        (name, f"llama-cpp:{label}") for name in ("900/0", "900/1") for label in ("f16", "q8_0")
    ]
    for line, sizes in zip(found, (EXACT_BYTES, Q8_BYTES) * 2):
        assert line["error"] is None and line["metrics"]["score"] == [1.0, 1.0]
        tokens = line["details"]["prompt_tokens"] + line["details"]["generated_tokens"] - 1
        assert line["details"]["generated_tokens"] == LIMIT
        assert line["bytes"] == tokens * sizes and line["dense_bytes"] == tokens * EXACT_BYTES
        assert line["environment"]["threads"] == 2 and line["digest"] in {case.digest for case in cases}
    assert by_llama_cpp.program.open == 0
    assert [job["threads"] for job in by_llama_cpp.jobs] == [3, 3]


def test_an_answer_ends_at_its_mark(by_llama_cpp: ModuleType, cases: list[Any], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    whole = tokenizer(cases[0].reference["outputs"][0]).input_ids
    ended = dataclasses.replace(cases[0], ends=(whole[-1],))
    (line,) = measure(by_llama_cpp, [ended], tmp_path / "records", "f16")
    assert line["details"]["ended"] and line["details"]["generated_tokens"] <= LIMIT


def test_what_is_there_is_not_run_again(by_llama_cpp: ModuleType, cases: list[Any], tmp_path: Path) -> None:
    """Failures, however, are run again on request."""
    folder = tmp_path / "records"
    by_llama_cpp.program.broken = {"q4_0"}
    found = measure(by_llama_cpp, cases, folder, "q8_0", "q4_0")
    assert [line["error"] for line in found] == [None, "no q4_0 here"] * 2
    by_llama_cpp.program.broken, by_llama_cpp.jobs = set(), []
    assert measure(by_llama_cpp, cases, folder, "q8_0", "q4_0") == found and by_llama_cpp.jobs == []
    found = measure(by_llama_cpp, cases, folder, "q8_0", "q4_0", retry=True)
    assert [job["methods"] for job in by_llama_cpp.jobs] == [["llama-cpp:q4_0"]] * 2
    assert [line["error"] for line in found[4:]] == [None, None]


def test_a_model_without_a_gguf_file(by_llama_cpp: ModuleType, cases: list[Any], tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").unlink()
    with pytest.raises(EvaluationError, match="make models MODELS=smollm2 GGUF=1"):
        measure(by_llama_cpp, cases, tmp_path / "records", "f16")


def test_no_environment(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("field_tasks.by_llama_cpp")
    monkeypatch.setattr(module.ENVIRONMENT, "find_python", lambda: None)
    with pytest.raises(EvaluationError, match="make llama-cpp"):
        module.ENVIRONMENT.run_job({})
