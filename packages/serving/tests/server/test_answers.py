"""Thoughts and calls of tools in the answers of the routes: a scripted text stands for the model's."""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)

from hf_diffkv_serving.batching.sampling import Sampling
from hf_diffkv_serving.server.answers import Answer, Served
from hf_diffkv_serving.server.chat import ChatAnswer, ChatBody
from hf_diffkv_serving.server.errors import RefusedError
from hf_diffkv_serving.server.generation import Run, Step
from hf_diffkv_serving.server.responses import ResponseAnswer, ResponseBody
from hf_diffkv_serving.server.text import Transcript
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving_app import markup, tokenizer

TEXT = '<why>It is[{"name": "height", "arguments": {"tree": "oak"}}][{"name": "age", "arguments": {}}]'
CALLS = [("height", '{"tree": "oak"}'), ("age", "{}")]
SERVED: Any = Served(
    "tiny",
    None,
    SimpleNamespace(tokenizer=tokenizer(), usual=Sampling(), keeps_prefixes=False),
)


def run_of(text: str, reason: str) -> Run:
    """A run with the steps of a model that says `text`, a token at a time."""
    transcript = Transcript(tokenizer(), markup())
    run, ids = Run(prompt_tokens=3), tokenizer()(text).input_ids
    run.open = {0}
    run.steps.put_nowait((0, Step(transcript.begin())))
    for token in ids:
        run.completion_tokens += 1
        run.steps.put_nowait((0, Step(transcript.add(token))))
    run.steps.put_nowait((0, Step(transcript.end(), finish_reason=reason)))
    return run


def whole(answer: Answer, text: str, reason: str) -> dict[str, Any]:
    async def collect() -> dict[str, Any]:
        run = run_of(text, reason)
        return answer.whole(run, await run.collect())

    return asyncio.run(collect())


def events(answer: Answer, text: str, reason: str) -> list[Any]:
    async def collect() -> list[str]:
        return [event async for event in answer.events(run_of(text, reason))]

    data = [event.split("data: ")[1].strip() for event in asyncio.run(collect())]
    return [json.loads(each) for each in data if each != "[DONE]"]


def chat(**fields: Any) -> ChatAnswer:
    return ChatAnswer(SERVED, ChatBody(messages=[{"role": "user", "content": "a"}], **fields), "1")


def test_tools_are_called_where_they_are_given() -> None:
    function = {"name": "height", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    for fields, calls in (({}, False), ({"tools": tools}, True), ({"tools": tools, "tool_choice": "none"}, False)):
        assert chat(**fields).asked(Sampling()).calls is calls
        assert ResponseAnswer(SERVED, ResponseBody(input="a", **fields), "1").asked(Sampling()).calls is calls


def test_tools_without_a_place_in_the_template_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer(), "chat_template", template)
    tools = [{"type": "function", "function": {"name": "height"}}]
    for answer in (chat(tools=tools), ResponseAnswer(SERVED, ResponseBody(input="a", tools=tools), "1")):
        with pytest.raises(RefusedError, match="does not support tools; leave them out") as refused:
            answer.asked(Sampling())
        assert refused.value.status == 400 and refused.value.param == "tools"
    assert not chat(tools=tools, tool_choice="none").asked(Sampling()).calls


def test_a_chat_with_calls() -> None:
    answer = ChatCompletion.model_validate(whole(chat(), TEXT, "stop"), strict=True)
    message = answer.choices[0].message
    assert message.content == "It is" and message.reasoning_content == "why"
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == CALLS
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.choices[0].finish_reason == "tool_calls"
    # what it said may be handed back
    ChatBody(messages=[{"role": "user", "content": "a"}, message.model_dump()])
    cut = whole(chat(), TEXT[:-5], "length")["choices"][0]
    assert cut["finish_reason"] == "length" and len(cut["message"]["tool_calls"]) == 1
    assert whole(chat(), "so", "stop")["choices"][0]["finish_reason"] == "stop"


def test_a_stream_of_a_chat_with_calls() -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in events(body, TEXT, "stop")]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "It is"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (i, *call) for i, call in enumerate(CALLS)
    ]
    assert len({call.id for call in calls}) == 2 and deltas[0].role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "tool_calls"]
    assert chunks[-1].usage.completion_tokens == len(tokenizer()(TEXT).input_ids)


def test_a_response_with_calls() -> None:
    answer = ResponseAnswer(SERVED, ResponseBody(input="a"), "1")
    found = Response.model_validate(whole(answer, TEXT, "stop"))
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output[0].content[0].text == "why" and found.output_text == "It is"
    assert [(item.name, item.arguments) for item in found.output[2:]] == CALLS
    assert found.status == "completed" and found.incomplete_details is None
    items = [item.model_dump() for item in found.output]
    given = ResponseBody(input=[{"role": "user", "content": "a"}, *items]).input
    assert [message.role for message in given] == ["user", "assistant"] and len(given[1].tool_calls) == 2
    assert given[1].reasoning_content == "why" and given[1].content == "It is"


def test_a_stream_of_a_response_with_calls() -> None:
    answer = ResponseAnswer(SERVED, ResponseBody(input="a", stream=True), "1")
    adapter = TypeAdapter(ResponseStreamEvent)
    found = [adapter.validate_python(each) for each in events(answer, TEXT, "stop")]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    done = [event.item for event in found if event.type == "response.output_item.done"]
    final = found[-1].response
    assert found[-1].type == "response.completed" and done == final.output
    added = [event for event in found if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert [event.item.id for event in added] == [item.id for item in done]
    for kind, text in (("reasoning_text", "why"), ("output_text", "It is")):
        deltas = [event.delta for event in found if event.type == f"response.{kind}.delta"]
        (end,) = (event.text for event in found if event.type == f"response.{kind}.done")
        assert "".join(deltas) == end == text and len(deltas) > 1
    arguments = [event.arguments for event in found if event.type == "response.function_call_arguments.done"]
    assert arguments == [each for _, each in CALLS]
    # calls alone need no message, and nothing needs an empty one
    assert [item["type"] for item in whole(answer, TEXT.partition("It is")[2], "stop")["output"]] == [
        "function_call"
    ] * 2
    nothing = whole(answer, "", "length")
    assert nothing["status"] == "incomplete" and nothing["output"][0]["content"][0]["text"] == ""
