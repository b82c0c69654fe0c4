"""Runs of field tasks on a tiny chat model: resuming, joining answers, and shared prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_chat_models import byte_tokenizer, tiny_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session
from hf_diffkv.running.models import CHECKOUT, TINY_LM

TEXT = "A text that comes first, long enough to be compressed. " * 3
FACTS = (CHECKOUT / "examples" / "prompts" / "recall.txt").read_text()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_chat_model("llama", tokenizer)


@pytest.fixture(scope="module")
def tiny_lm() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()


@pytest.fixture
def measuring(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("field_tasks.measuring")


@pytest.fixture
def cases(measuring: ModuleType, tokenizer: Any) -> list[Any]:
    ids = [tuple(tokenizer(f"{TEXT}Which is number {number}?").input_ids) for number in range(3)]
    return [
        measuring.Case("vt", f"200/{number}", each, 6, (tokenizer.eos_token_id,), {"outputs": ["a", "b"]})
        for number, each in enumerate(ids)
    ]


def lines_of(folder: Path, task: str = "vt") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


def test_records(measuring: ModuleType, model: Any, tokenizer: Any, cases: list[Any], tmp_path: Path) -> None:
    methods = [get_method("dense"), get_method("diffkv")]
    measuring.measure(model, tokenizer, methods, cases[:2], measuring.Records(tmp_path), quiet=True)
    found = lines_of(tmp_path)
    # both methods run on a case before the next one
    assert [(line["document"], line["method"]) for line in found] == [
        ("200/0", "dense"),
        ("200/0", "diffkv"),
        ("200/1", "dense"),
        ("200/1", "diffkv"),
    ]
    for line, case in zip(found[::2], cases):
        details = line["details"]
        seen = details["prompt_tokens"] + details["generated_tokens"] - 1
        assert line["bytes"] == line["dense_bytes"] == seen * measuring.Answering(model).bytes_per_token
        assert line["digest"] == case.digest and details["prompt_tokens"] == len(case.ids)
        assert 0.0 <= line["metrics"]["score"][0] <= 1.0 and line["seconds"] > 0
        assert {"torch", "transformers", "commit", "device"} <= set(line["environment"])
        assert line["basis"]["code"]
    assert all(line["bytes"] < line["dense_bytes"] for line in found[1::2])


def test_a_run_continues(measuring: ModuleType, model: Any, tokenizer: Any, cases: list[Any], tmp_path: Path) -> None:
    dense, diffkv = get_method("dense"), get_method("diffkv")
    records = measuring.Records(tmp_path)
    measuring.measure(model, tokenizer, [dense], cases[:2], records, quiet=True)
    path = tmp_path / "vt.jsonl"
    whole = path.read_bytes()
    # a run that was killed while writing
    path.write_bytes(whole[:-20])
    measuring.measure(model, tokenizer, [dense, diffkv], cases, records, quiet=True)
    found = lines_of(tmp_path)
    assert [(line["document"], line["method"]) for line in found] == [
        ("200/0", "dense"),
        ("200/0", "diffkv"),
        ("200/1", "dense"),
        ("200/1", "diffkv"),
        ("200/2", "dense"),
        ("200/2", "diffkv"),
    ]
    assert found[0] == json.loads(whole.splitlines()[0])
    before = path.read_bytes()
    measuring.measure(model, tokenizer, [dense, diffkv], cases, records, quiet=True)
    assert path.read_bytes() == before


def test_another_prompt_is_measured_anew(
    measuring: ModuleType, model: Any, tokenizer: Any, cases: list[Any], tmp_path: Path
) -> None:
    records, dense = measuring.Records(tmp_path), [get_method("dense")]
    measuring.measure(model, tokenizer, dense, cases[:1], records, quiet=True)
    case = cases[0]
    other = measuring.Case(case.task, case.name, cases[1].ids, case.limit, case.ends, case.reference)
    measuring.measure(model, tokenizer, dense, [other], records, quiet=True)
    assert [line["digest"] for line in lines_of(tmp_path)] == [case.digest, other.digest]


def test_a_method_that_fails(
    measuring: ModuleType,
    model: Any,
    tokenizer: Any,
    cases: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gets a line that gives the reason, and is run again on request."""
    records, method = measuring.Records(tmp_path), get_method("diffkv")
    with monkeypatch.context() as broken:
        broken.setattr(type(method), "new_cache", lambda *ignored: 1 / 0)
        measuring.measure(model, tokenizer, [method], cases[:1], records, quiet=True)
    measuring.measure(model, tokenizer, [method], cases[:1], records, quiet=True)
    assert [line["error"] for line in lines_of(tmp_path)] == ["ZeroDivisionError: division by zero"]
    measuring.measure(model, tokenizer, [method], cases[:1], records, retry=True, quiet=True)
    assert [record.error for record in records.of("vt")] == [None]


@pytest.mark.parametrize("label", ["dense", "diffkv", "quanto:4"])
def test_earlier_turns_are_read_once(
    measuring: ModuleType, model: Any, tokenizer: Any, label: str, uncompiled_quanto: None
) -> None:
    """They are continued as in a session that read both parts."""
    method = get_method(label)
    earlier, ends = tuple(tokenizer(TEXT).input_ids), (tokenizer.eos_token_id,)
    asked = [tuple(tokenizer(f"Question {number}?").input_ids) for number in range(2)]
    answering = measuring.Answering(model)
    for ids in asked:
        case = measuring.Case("gsm8k_turns", "0", ids, 6, ends, {"expected": "1"}, earlier)
        answer = answering.answer(method, case)
        session = Session(model, method)
        session.forward(earlier)
        written = [int(session.forward(ids)[-1].argmax())]
        while len(written) < 6 and written[-1] not in ends:
            written.append(int(session.forward([written[-1]])[-1].argmax()))
        assert list(answer.ids) == written
        assert answer.held.bytes == session.held().bytes
        assert answer.dense_bytes == answering.bytes_per_token * session.seen


def test_answers_of_another_engine(
    measuring: ModuleType, model: Any, tokenizer: Any, cases: list[Any], tmp_path: Path
) -> None:
    records = measuring.Records(tmp_path)
    ids = tokenizer("it is a").input_ids
    case = cases[0]
    line = {"method": "other:4", "task": "vt", "name": case.name, "digest": case.digest, "ids": ids, "seconds": 1.5}
    known = {**line, "bytes": 10, "dense_bytes": 40, "environment": {"engine": "1.0"}}
    failed = {**line, "name": cases[1].name, "digest": cases[1].digest, "error": "no memory"}
    assert measuring.join(tokenizer, cases, [known, failed], records) == 2
    assert measuring.join(tokenizer, cases, [known], records) == 0
    first, second = records.of("vt")
    assert (first.method, first.metrics, first.bytes, first.dense_bytes) == ("other:4", {"score": [0.5, 1.0]}, 10, 40)
    assert (first.details["text"], first.environment, first.seconds) == ("it is a", {"engine": "1.0"}, 1.5)
    assert (second.error, second.metrics) == ("no memory", {})
    with pytest.raises(EvaluationError, match="answer 1 .* is to none of these cases"):
        measuring.join(tokenizer, cases, [{**line, "digest": "x"}], records)
    with pytest.raises(EvaluationError, match=r"lacks \['ids'\] or has unknown fields \['id'\]"):
        measuring.join(tokenizer, cases, [{**{k: v for k, v in line.items() if k != "ids"}, "id": ids}], records)


SHARING = ["dense", "diffkv", "diffkv:small", "diffkv:quality", "diffkv:3/0.5", "diffkv:K8V4", "quanto:4", "fp8"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("label", SHARING)
def test_a_shared_prompt_is_a_method_s_own(
    script: Callable[[str], ModuleType], tiny_lm: Any, label: str, uncompiled_quanto: None
) -> None:
    """The cache contents, the generated text and the logits after it match those of the method's own prompt."""
    shared_prompts, answers = script("field_tasks.shared_prompts"), script("field_tasks.answers")
    code, method = AutoTokenizer.from_pretrained(TINY_LM), get_method(label)
    assert shared_prompts.can_share(method, tiny_lm)
    ends = (code("\n").input_ids[0],)
    for key in ("sky", "oak"):
        ids = tuple(code(f"{FACTS[:600]}\n?{key}=").input_ids)
        given = shared_prompts.hand_over(tiny_lm, method, shared_prompts.read_prompt(tiny_lm, ids))
        own = Session(tiny_lm, method)
        own.forward(ids)
        assert given.held() == own.held()
        for mine, theirs in zip(given.cache.layers, own.cache.layers):
            assert _nearly_all_equal(mine, theirs)
        token = code("4").input_ids
        torch.testing.assert_close(given.forward(token), own.forward(token), rtol=0, atol=0.02)
        case = answers.Case("vt", "0", ids, 24, ends)
        shared, alone = (answers.Answering(tiny_lm, share).answer(method, case) for share in (True, False))
        assert shared.ids == alone.ids and shared.held == alone.held and shared.dense_bytes == alone.dense_bytes
        assert shared.shared and not alone.shared and len(shared.ids) > 3
    assert tiny_lm.config._attn_implementation == "sdpa"


def _nearly_all_equal(mine: Any, theirs: Any) -> bool:
    """Whether two layers hold the same keys and values; rounding may move a few of them to a neighbouring code."""
    pairs = list(zip(_held(mine), _held(theirs)))
    assert all(a.numel() > 1000 for a, _ in pairs)
    return all(
        a.shape == b.shape and float(torch.isclose(a, b, rtol=1e-3, atol=1e-4).float().mean()) > 0.99 for a, b in pairs
    )


def _held(layer: Any) -> list[torch.Tensor]:
    """Keys and values of a layer; quantised ones on their own, without the residual."""
    if hasattr(layer, "_quantized_keys"):
        return [layer._dequantize(part) for part in (layer._quantized_keys, layer._quantized_values)]
    return [layer.keys, layer.values]


def test_the_command(script: Callable[[str], ModuleType], tmp_path: Path, capsys: Any) -> None:
    field = script("field")
    assert field.main(["table", "--model", "tiny-lm", "--results", str(tmp_path)]) == 2
    assert "holds no records" in capsys.readouterr().err
    script("field_tasks.wheels").DATA = tmp_path
    assert field.main(["ruler", "--model", "tiny-lm", "--results", str(tmp_path)]) == 2
    assert "make field-data" in capsys.readouterr().err
