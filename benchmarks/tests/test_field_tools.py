"""BFCL tool calls: prompts with functions and calls, scores and losses, on made-up lines in the wheel's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_chat_models import byte_tokenizer, tiny_chat_model

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session

TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool | tojson }}>{% endfor %}"
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ACCEPTED = {
    "city": ["Bern", "Berne, CH"],
    "days": [3],
    "scale": ["", 1.5],
    "hourly": ["", True],
    "places": [["lake", "old town"]],
    "filter": [{"from": [6], "to": ["", 18]}],
}
RIGHT = {"city": "Bern", "days": 3, "places": ["lake", "Old-Town"], "filter": {"from": 6}}


def problem(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the lines of a problem with two functions and of its answer."""
    names = f"weather.get_{number}", f"noise_{number}"
    functions = [
        {
            "name": name,
            "description": f"Tells {name}.",
            "parameters": {
                "type": "dict",
                "properties": {"city": {"type": "string"}, "scale": {"type": "float"}, "days": {"type": "integer"}},
            },
        }
        for name in names
    ]
    asked = {"id": f"p_{number}", "question": [[{"role": "user", "content": f"Rain {number}?"}]], "function": functions}
    return asked, {"id": f"p_{number}", "ground_truth": [{names[0]: {"city": [f"C{number}"], "scale": ["", 1.0]}}]}


@pytest.fixture
def bfcl(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = script("field_tasks").bfcl
    folder = tmp_path / found.wheels.BFCL
    (folder / "possible_answer").mkdir(parents=True)
    lines = [problem(number) for number in [*range(25), 3, 7]]
    for path, part in ((folder / found.FILE, 0), (folder / "possible_answer" / found.FILE, 1)):
        path.write_text("".join(json.dumps(each[part]) + "\n" for each in lines))
    monkeypatch.setattr(found.wheels, "site", lambda: tmp_path)
    return found


@pytest.fixture
def tokenizer() -> Any:
    found = byte_tokenizer()
    found.chat_template = TEMPLATE
    return found


def made(bfcl: ModuleType, tokenizer: Any, **options: Any) -> list[Any]:
    return bfcl.cases(bfcl.Source(tokenizer, "", **{"tasks": bfcl.TASKS, **options}))


def test_cases(bfcl: ModuleType, tokenizer: Any) -> None:
    found = made(bfcl, tokenizer, length=3000)
    # each name once
    assert [case.name for case in found] == [f"p_{number}" for number in range(25)] * 2
    alone, behind = found[12], found[25 + 12]
    text = tokenizer.decode(list(alone.ids))
    assert (
        text.count("Tells ") == 2 and text.endswith('<|user|>Rain 12?</s><|assistant|>{"name": "') and not alone.earlier
    )
    # types as in JSON Schema
    assert '"type": "object"' in text and '"type": "number"' in text and "dict" not in text and "float" not in text
    assert tokenizer.decode(list(behind.ids)) == '<|user|>Rain 12?</s><|assistant|>{"name": "'
    assert bfcl.score(behind, 'weather.get_12", "arguments": {"city": "C12"}}</call>') == 1.0
    assert bfcl.score(behind, 'weather.get_11", "arguments": {"city": "C12"}}') == 0.0
    earlier = tokenizer.decode(list(behind.earlier))
    assert len(behind.earlier) >= 3000 and all(f"Tells noise_{number}." in earlier for number in range(10, 20))
    # calls of other groups are shown, without optional arguments
    call = '<|user|>Rain 20?</s><|assistant|>{"name": "weather.get_20", "arguments": {"city": "C20"}}</s>'
    assert call + f"<|tool|>{bfcl.RESULT}</s><|assistant|>{bfcl.COMMENT}</s>" in earlier
    assert not any(f"Rain {number}?" in earlier for number in range(10, 20))
    assert alone.solution == behind.solution == 'weather.get_12", "arguments": {"city": "C12"}}</s>'
    # one prefix for each group
    assert len({case.earlier for case in found[25:]}) == 3
    assert [case.name for case in made(bfcl, tokenizer, tasks=("bfcl",), samples=2)] == ["p_0", "p_1"]


def test_more_tokens_than_there_are(bfcl: ModuleType, tokenizer: Any) -> None:
    with pytest.raises(EvaluationError, match="--length 100000 is more than"):
        made(bfcl, tokenizer, length=100_000)


def test_a_template_without_tools(bfcl: ModuleType, tokenizer: Any) -> None:
    for words in ("tools or []", "turn.tool_calls or []"):
        tokenizer.chat_template = TEMPLATE.replace(words, "[]")
        with pytest.raises(EvaluationError, match="takes no tools"):
            made(bfcl, tokenizer, tasks=("bfcl",))


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"scale": 1.5, "hourly": True, "filter": {"from": 6, "to": 18}}, True),
        ({"city": "berne CH"}, True),
        ({"city": "Basel"}, False),
        ({"city": ["Bern"]}, False),
        ({"days": 3.0}, True),
        ({"days": "3"}, False),
        ({"days": True}, False),
        ({"hourly": 1}, False),
        ({"scale": 2}, False),
        ({"places": ["lake"]}, False),
        ({"places": ["old town", "lake"]}, False),
        ({"filter": {"to": 18}}, False),
        ({"filter": {"from": 6, "by": 1}}, False),
        ({"unknown": 1}, False),
        ({"days": None}, False),
    ],
)
def test_arguments(bfcl: ModuleType, change: dict[str, Any], right: bool) -> None:
    case = bfcl.Case("bfcl", "0", (1,), 8, (0,), {"accepted": [{"weather.get": ACCEPTED}], "begun": ""})
    text = json.dumps({"name": "weather.get", "arguments": {**RIGHT, **change}})
    assert bfcl.score(case, text) == float(right)
    for name in ("city", "days", "places", "filter"):
        arguments = {key: value for key, value in RIGHT.items() if key != name}
        assert bfcl.score(case, json.dumps({"name": "weather.get", "arguments": arguments})) == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<tool_call>\nCALL\n</tool_call>", True),
        ("I will look. ```json\nCALL\n```", True),
        ('{"function": CALL}', True),
        ("{CALL}", True),
        ("CALL CALL", False),
        ("{", False),
        ('{"name": "weather.get"}', False),
        ('{"function": "weather.get"}', False),
        ("Sunny.", False),
    ],
)
def test_calls_in_answers(bfcl: ModuleType, text: str, right: bool) -> None:
    case = bfcl.Case("bfcl", "0", (1,), 8, (0,), {"accepted": [{"weather.get": {"city": ["Bern"]}}], "begun": ""})
    call = '{"name": "weather.get", "arguments": {"city": "Bern"}}'
    assert bfcl.score(case, text.replace("CALL", call)) == float(right)
    assert bfcl.score(case, call.replace("weather.get", "weather_get")) == 0.0


def test_losses_of_calls(bfcl: ModuleType, tokenizer: Any, script: Callable[[str], ModuleType]) -> None:
    labels = ["diffkv:lossless", "diffkv:K4V2"]
    model = tiny_chat_model("llama", tokenizer)
    with torch.no_grad():
        rows = list(script("tool_calls").measure(model, tokenizer, 12, 1500, labels))
    cases = made(bfcl, tokenizer, tasks=("bfcl_turns",), samples=12, length=1500)
    names = [case.name for case in cases]
    assert [(row["question"], row["method"]) for row in rows] == [
        (name, label) for group in (names[:10], names[10:]) for label in labels for name in group
    ]
    case, call = cases[11], bfcl.encode(tokenizer, cases[11].solution)

    def predictions(label: str) -> tuple[torch.Tensor, int]:
        session = Session(model, get_method(label))
        session.forward(case.earlier)
        held = session.held().bytes
        return session.forward((*case.ids, *call[:-1]), keep=len(call)).double().log_softmax(-1), held

    dense, dense_bytes = predictions("dense")
    found = {row["method"]: row for row in rows if row["question"] == case.name}
    for label, row in found.items():
        mine, held = predictions(label)
        kl = float((dense.exp() * (dense - mine)).sum(-1).mean())
        assert (row["tokens"], row["bytes"], row["dense_bytes"]) == (len(call), held, dense_bytes)
        assert row["kl"] == pytest.approx(kl, rel=0.02, abs=1e-6)
    assert found["diffkv:lossless"]["kl"] < 1e-5 < found["diffkv:K4V2"]["kl"]
