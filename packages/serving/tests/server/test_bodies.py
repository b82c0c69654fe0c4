"""Errors of bodies name the field, and the server goes on."""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)

from hf_diffkv_serving.server.app import build_app
from hf_diffkv_serving.server.limits import BodyLimit
from serving_app import NAME, engine, model, served, tokenizer

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    COMPLETION: {"prompt": "a", "max_tokens": 1},
    RESPONSE: {"input": "a", "max_output_tokens": 1},
}
IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
# values that no field of a kind takes
NO_TEXT = [5, 1.5, True, {}, {"a": 1}]
NO_COUNT = ["ten", 0, -3, 1.5, True, [], {}, 2**70]
NO_SHARE = ["0.5", -0.1, 7.5, True, [], {}]
NO_FLAG = ["true", 1, 0, [], {}]
NO_CALL = [{"id": "1", "function": {"name": "f", "arguments": "{"}}]
TOOL = {"name": "f", "parameters": {}}
# of each field, what is refused, which is what asks for something that is not there, and what is no such thing
SHARED: dict[str, list[Any]] = {
    "model": NO_TEXT,
    "stream": NO_FLAG,
    "temperature": NO_SHARE,
    "top_p": NO_SHARE,
    "min_p": NO_SHARE,
    "top_k": ["5", -2, 1.5, True, []],
    "seed": ["5", 1.5, True, 2**63],
    "ignore_eos": NO_FLAG,
    "metadata": [5, [], {"a": 1}],
    "user": NO_TEXT,
    "service_tier": ["flex", 5],
    "unknown": [None, 1],
    "stream_options": [5, [], {"include_usage": 1}, {"include_obfuscation": True}, {"other": 1}],
}
CHOICES: dict[str, list[Any]] = {
    "n": [*NO_COUNT, 129],
    "stop": [5, "", ["a", ""], ["a", 5], {}, ["a"] * 17],
    "logit_bias": [{"5": 1}, 5],
    "frequency_penalty": [0.5, "0", True],
    "presence_penalty": [0.5, "0", False],
    "max_tokens": NO_COUNT,
}
TOOLS: dict[str, list[Any]] = {
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 5],
    "parallel_tool_calls": [False, 1],
    "chat_template_kwargs": [5, [], {"tokenize": False}, {"chat_template": "{{ 1 }}"}],
    "store": [True, 0],
    "top_logprobs": [*NO_COUNT[2:], 21],
}
REFUSED: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **SHARED,
        **CHOICES,
        **TOOLS,
        "messages": [
            *(None, [], "hello", 5, {}, ["hello"], [5], [{}], [{"role": "user"}], [{"content": "a"}]),
            *([{"role": role, "content": "a"}] for role in ("robot", 5, None)),
            *(
                [{"role": "user", "content": content}]
                for content in (5, None, {}, [5], ["a"], [{}], [IMAGE], [{"type": "text"}])
            ),
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a", "other": 1}]}],
            [{"role": "user", "content": "a", "other": 1}],
            *([{"role": "assistant", "content": "a", "tool_calls": calls}] for calls in (5, [5], [{}], NO_CALL)),
        ],
        "max_completion_tokens": NO_COUNT,
        "logprobs": NO_FLAG,
        "tools": [
            5,
            [5],
            [{}],
            [{"type": "function"}],
            [{"type": "custom", "custom": TOOL}],
            [TOOL],
            [{"type": "function", "function": {**TOOL, "strict": True}}],
        ],
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "text", 5],
        "modalities": [["text", "audio"], "text"],
        **{
            name: [True, {"a": 1}]
            for name in ("audio", "function_call", "functions", "prediction", "reasoning_effort", "web_search_options")
        },
    },
    COMPLETION: {
        **SHARED,
        **CHOICES,
        "prompt": [None, 5, [], {}, [[]], [5, "a"], [[5], 5], [-1], [10**6], [[1], [True]], ["a", None], ""],
        "logprobs": [-1, 21, True, "1"],
        "best_of": [2, "1", True],
        "echo": [True, 0],
        "suffix": ["a", 5],
    },
    RESPONSE: {
        **SHARED,
        **TOOLS,
        "input": [
            *(None, 5, [], {}, [5], [{}], [{"role": "robot", "content": "a"}], [{"type": "message", "content": "a"}]),
            *([{"type": "input_image", "image_url": "a"}], [{"type": "item_reference", "id": "a"}], [{"type": []}]),
            *([{"role": "user", "content": content}] for content in (5, [IMAGE], [{"type": "input_file"}])),
            *([{"type": "function_call", "name": name, "arguments": "{"}] for name in ("f", 5, None)),
            [{"type": "function_call_output", "call_id": "a"}, {"role": "user", "content": "a"}],
            [{"type": "reasoning", "content": 5}, {"role": "user", "content": "a"}],
        ],
        "instructions": NO_TEXT,
        "max_output_tokens": NO_COUNT,
        "include": [["reasoning.encrypted_content"], "message.output_text.logprobs", 5],
        "tools": [5, [5], [{}], [{"type": "web_search"}], [{"type": "function", **TOOL, "strict": True}]],
        "text": [{"format": {"type": "json_object"}}, {"verbosity": "low"}, "text"],
        "background": [True],
        "previous_response_id": ["resp_1"],
        "reasoning": [{"effort": "low"}],
        "truncation": ["auto"],
        "conversation": ["a"],
    },
}
CASES = [
    (route, field, value) for route, fields in REFUSED.items() for field, values in fields.items() for value in values
]
NO_JSON = [
    *(b"", b"{", b"null", b"[]", b'"a"', b"5", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"seed": 1e999}'),
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800", "input": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
]


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with engine() as running:
        yield build_app(NAME, model(), tokenizer(), running)


def answers(app: Any, requests: list[tuple[str, bytes]]) -> list[Any]:
    """Returns the responses over ASGI. Exceptions of the application are raised."""

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app=app)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return [await client.post(route, content=content, headers=headers) for route, content in requests]

    return asyncio.run(ask())


def reason(answer: Any) -> dict[str, Any]:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and error["type"] == "invalid_request_error"
    return error


def check_goes_on(app: Any) -> None:
    for found in answers(app, [(route, json.dumps(body).encode()) for route, body in GOOD.items()]):
        assert found.status_code == 200, found.text


def test_what_is_refused_is_named(app: Any) -> None:
    """Sends every field with every refused value of the tables."""
    bodies = [(route, json.dumps({**GOOD[route], field: value}).encode()) for route, field, value in CASES]
    for (route, field, value), found in zip(CASES, answers(app, bodies)):
        param = reason(found)["param"]
        assert param is not None and param.split(".")[0].split("[")[0] == field, (route, field, value, found.text)
    check_goes_on(app)


def test_fields_that_are_missing_are_named(app: Any) -> None:
    for route, field in ((CHAT, "messages"), (COMPLETION, "prompt"), (RESPONSE, "input")):
        (found,) = answers(app, [(route, b"{}")])
        assert reason(found)["param"] == field


def test_fields_that_do_not_go_together(app: Any) -> None:
    for route, further, param in (
        (CHAT, {"max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETION, {"prompt": ["a"] * 17, "n": 128}, "n"),
    ):
        (found,) = answers(app, [(route, json.dumps({**GOOD[route], **further}).encode())])
        assert reason(found)["param"] == param


def test_a_server_that_fails_says_so_in_the_same_form(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> Any:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(CHAT, json=GOOD[CHAT])

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("hf_diffkv_serving.server.generation.Generation.start", fail)
    found = asyncio.run(ask())
    assert found.status_code == 500
    assert found.json()["error"]["type"] == "server_error" and "of our own" in found.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_taken(app: Any) -> None:
    fields: dict[str, dict[str, Any]] = {
        CHAT: {
            **{
                "n": 1,
                "stop": [],
                "logit_bias": {},
                "frequency_penalty": 0,
                "presence_penalty": 0.0,
                "logprobs": False,
            },
            **{"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "store": False},
            **{"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "tools": []},
        },
        COMPLETION: {"echo": False, "best_of": 1, "suffix": None, "n": 1, "logprobs": 0, "top_k": -1, "min_p": 0},
        RESPONSE: {
            **{"text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False, "include": []},
            **{"reasoning": {}, "top_logprobs": 0, "prompt_cache_key": "a", "safety_identifier": "a", "tools": []},
        },
    }
    for route, further in fields.items():
        nothing = dict.fromkeys(set(REFUSED[route]) - {"unknown"} - GOOD[route].keys())
        for more in (further, nothing):
            (found,) = answers(app, [(route, json.dumps({**GOOD[route], **more}).encode())])
            assert found.status_code == 200, found.text


@pytest.mark.parametrize("content", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_no_object_of_json(app: Any, content: bytes) -> None:
    for found in answers(app, [(route, content) for route in GOOD]):
        reason(found)


def test_what_is_no_json_at_all(app: Any) -> None:
    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                await client.post(CHAT, data={"messages": "a"}),
                await client.post(CHAT, content=b"a", headers={"content-type": "text/plain"}),
                await client.get(CHAT),
                await client.get("/v2"),
            ]

    found = asyncio.run(ask())
    assert [reason(each) and each.status_code for each in found] == [400, 400, 405, 404]


def junk(dice: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    if depth < 4 and dice.random() < 0.4:
        values = [junk(dice, depth + 1) for _ in range(dice.randrange(4))]
        return values if dice.random() < 0.5 else {text(dice): value for value in values}
    return dice.choice([None, True, False, dice.randint(-(10**20), 10**20), dice.uniform(-1e9, 1e9), text(dice)])


def text(dice: random.Random) -> str:
    # surrogates alone are no text, and can be said in JSON
    letters = 'abc \n\0"{}[]%é€🌳\ud800\udfff\u202e'
    return "".join(dice.choice(letters) for _ in range(dice.randrange(6)))


def malformed(dice: random.Random) -> tuple[str, bytes]:
    """A request that is certainly wrong."""
    route = dice.choice(list(GOOD))
    body, kind = dict(GOOD[route]), dice.randrange(6)
    if kind == 0:
        # cut short
        whole = json.dumps({**body, "user": text(dice)}).encode()
        return route, whole[: dice.randrange(len(whole))]
    if kind == 1:
        return route, dice.randbytes(dice.randrange(1, 40))
    if kind == 2:
        return route, json.dumps([junk(dice)]).encode()
    if kind == 3:
        body["x" + text(dice)] = junk(dice)
    if kind == 4:
        # no field takes an object of this kind within a list
        body[dice.choice(list(REFUSED[route]))] = [{"junk": junk(dice), "x" + text(dice): junk(dice)}]
    for _ in range(dice.randrange(4) if kind < 5 else 1 + dice.randrange(4)):
        field = dice.choice(list(REFUSED[route]))
        if kind != 4 or field not in body:
            body[field] = dice.choice(REFUSED[route][field])
    items = list(body.items())
    dice.shuffle(items)
    return route, json.dumps(dict(items)).encode()


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_malformed_bodies(app: Any, count: int) -> None:
    dice = random.Random(count)
    for found in answers(app, [malformed(dice) for _ in range(count)]):
        reason(found)
    check_goes_on(app)


def test_errors_are_described(app: Any) -> None:
    """Under the statuses that are sent, in the form that is sent."""
    described = app.openapi()
    (found,) = answers(app, [(COMPLETION, b"{}")])
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", "4XX", "5XX"}, path
            for status in ("4XX", "5XX"):
                name = operation["responses"][status]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
                whole = described["components"]["schemas"][name]
                fields = described["components"]["schemas"][whole["properties"]["error"]["$ref"].split("/")[-1]]
                assert set(whole["required"]) == found.json().keys()
                assert set(fields["required"]) == found.json()["error"].keys()


@pytest.mark.parametrize("told", [True, False], ids=["length", "chunks"])
def test_a_connection_is_used_again_after_a_body_that_is_too_large(app: Any, told: bool) -> None:
    piece, count = b" " * (1 << 16), 200
    content = piece * count if told else (piece for _ in range(count))
    with served(BodyLimit(app, 100_000)) as address, httpx.Client(base_url=address, timeout=60) as client:
        answer = client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        assert client.post(CHAT, json=GOOD[CHAT]).status_code == 200


def test_what_is_beyond_the_limit_is_not_read() -> None:
    """The application gets no byte of it, and nothing more is asked for."""
    asked, got, sent = [], [], []

    async def application(scope: dict, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            got.append(len(message["body"]))

    async def receive() -> dict:
        asked.append(None)
        return {"type": "http.request", "body": b"a" * 40, "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(BodyLimit(application, 100)({"type": "http", "headers": []}, receive, send))
    assert got == [40, 40] and len(asked) == 3 and sent[0]["status"] == 413


def test_a_connection_is_used_again_after_a_refusal(app: Any) -> None:
    with served(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        for body in ({"messages": "hello"}, GOOD[CHAT], {"messages": []}, GOOD[CHAT]):
            assert client.post(CHAT, json=body).status_code == (200 if body is GOOD[CHAT] else 400)
