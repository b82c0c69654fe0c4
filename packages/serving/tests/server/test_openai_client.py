"""Answers to OpenAI's own client, streamed or not, which honour every field."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)

from hf_diffkv_serving.server.app import build_app
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from serving_app import NAME, engine, expected, model, served, tokenizer

ASKED, NEW = "@oak=5305 @elm=1177 ?elm=", 8
MESSAGES = [{"role": "user", "content": ASKED}]
DRAWN: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "extra_body": {"top_k": 30}}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with engine() as running, served(build_app(NAME, model(), tokenizer(), running)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as found:
            yield found


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "max_tokens": NEW, **fields})


def complete(client: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": ASKED, "max_tokens": NEW, **fields})


def respond(client: Any, **fields: Any) -> Any:
    return client.responses.create(**{"model": NAME, "input": ASKED, "max_output_tokens": NEW, **fields})


def texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def streamed(chunks: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Text and finish reason of each choice of a chat, and all chunks."""
    said: dict[int, str] = {}
    reasons: dict[int, str] = {}
    chunks = list(chunks)
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return said, reasons, chunks


def test_a_chat_says_what_generate_says(client: Any) -> None:
    answer = chat(client)
    assert texts(answer) == [expected(ASKED, NEW)]
    count = len(tokenizer()(ASKED).input_ids)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (count, NEW)
    assert answer.usage.total_tokens == count + NEW
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert texts(chat(client, max_tokens=openai.omit, max_completion_tokens=NEW)) == texts(answer)


def test_a_stream_says_the_same(client: Any) -> None:
    fields = {"n": 3, "seed": 5, **DRAWN}
    whole = chat(client, **fields)
    said, reasons, chunks = streamed(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert [said[i] for i in range(3)] == texts(whole) and len(set(texts(whole))) == 3
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3 * NEW == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and len(chunks) > 3 * NEW / 2
    said, _, chunks = streamed(chat(client, stream=True))
    assert said == {0: expected(ASKED, NEW)} and all(chunk.usage is None for chunk in chunks)


@pytest.mark.slow
def test_a_seed_says_the_same_in_any_company(client: Any) -> None:
    def ask(i: int) -> str:
        if i % 3 == 0:
            return texts(chat(client, seed=11, **DRAWN))[0]
        if i % 3 == 1:
            return texts(chat(client, temperature=0))[0]
        return texts(chat(client, seed=i, max_tokens=3 * NEW, **DRAWN))[0]

    alone = ask(0)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(18)))
    assert found[::3] == [alone] * 6
    assert found[1::3] == [expected(ASKED, NEW)] * 6
    assert len(set(found[2::3])) > 1
    # draws without a seed are others each time
    assert len({texts(chat(client, temperature=2, max_tokens=24))[0] for _ in range(3)}) == 3


@pytest.mark.parametrize("first", [0, 1, 4])
def test_an_answer_ends_before_a_stop_string(client: Any, first: int) -> None:
    whole = expected(ASKED, NEW)
    stop = [whole[first : first + 2], "x" + whole[0]]
    assert whole.find(stop[0]) == first
    answer = chat(client, stop=stop)
    assert texts(answer) == [whole[:first]] and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < NEW
    said, reasons, _ = streamed(chat(client, stop=stop, stream=True))
    assert said == {0: whole[:first]} and reasons == {0: "stop"}
    found = complete(client, stop=stop, n=2)
    assert [choice.text for choice in found.choices] == [whole[:first]] * 2
    assert texts(chat(client, stop="never")) == [whole]


@pytest.mark.slow
def test_an_end_token_stops(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # the first token of the answer ends those that may end
    ids = tokenizer()(expected(ASKED, NEW)).input_ids
    prompt = ASKED + tokenizer().decode(ids[:1])
    ends = ids[1]
    with engine() as running:
        running.generation_config.eos_token_id = ends
        with served(build_app(NAME, model(), tokenizer(), running)) as address:
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as other:
                found = complete(other, prompt=prompt)
                assert found.usage.completion_tokens == 1 and found.choices[0].finish_reason == "stop"
                assert complete(other, prompt=prompt, max_tokens=1).choices[0].finish_reason == "stop"
                on = complete(other, prompt=prompt, extra_body={"ignore_eos": True})
                assert on.usage.completion_tokens == NEW and on.choices[0].finish_reason == "length"


def test_logprobs(client: Any) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "seed": 3, "temperature": 1.5}
    answer = chat(client, **fields)
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == texts(answer)[0]
    assert len(content) == NEW and all(bytes(each.bytes).decode() == each.token for each in content)
    for each in content:
        assert len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob >= each.logprob - 1e-6
    _, _, chunks = streamed(chat(client, stream=True, **fields))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert [each for part in parts for each in part.content] == content
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(client).choices[0].logprobs is None
    found = complete(client, logprobs=2, seed=3, temperature=1.5).choices[0]
    assert found.logprobs.token_logprobs == [each.logprob for each in content]
    assert found.logprobs.text_offset == list(range(NEW)) and found.logprobs.tokens == list(found.text)
    assert all(token in top and 2 <= len(top) <= 3 for token, top in zip(found.text, found.logprobs.top_logprobs))


def test_prompts_of_all_forms(client: Any) -> None:
    others = "@yew=9021 ?yew="
    ids = [tokenizer()(text).input_ids for text in (ASKED, others)]
    wanted = [expected(ASKED, NEW), expected(others, NEW)]
    assert complete(client).choices[0].text == wanted[0]
    for prompt in ([ASKED, others], ids):
        found = complete(client, prompt=prompt, n=2)
        assert [choice.text for choice in found.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
        assert found.usage.prompt_tokens == sum(map(len, ids)) and found.usage.completion_tokens == 4 * NEW
    said: dict[int, str] = {}
    for chunk in complete(client, prompt=[ids[1], ids[0]], stream=True):
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + choice.text
    assert said == {0: wanted[1], 1: wanted[0]}
    assert complete(client, prompt=ids[0]).choices[0].text == wanted[0]


def test_a_response_is_an_object(client: Any) -> None:
    answer = respond(client)
    assert answer.output_text == expected(ASKED, NEW)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == NEW
    Response.model_validate(answer.model_dump(warnings=False))
    # what it said, handed back
    turns = [*MESSAGES, *answer.output, {"role": "user", "content": [{"type": "input_text", "text": ASKED}]}]
    further = respond(client, input=turns, instructions="Say it.", metadata={"a": "b"})
    prompt = f"@system=Say it.\n@user={ASKED}\n@assistant={answer.output_text}\n{ASKED}"
    assert further.output_text == expected(prompt, NEW)
    assert further.metadata == {"a": "b"} and further.instructions == "Say it."


def test_a_stream_of_a_response(client: Any) -> None:
    fields = {"temperature": 1.5, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = list(respond(client, stream=True, extra_body={"seed": 4}, **fields))
    answer = respond(client, extra_body={"seed": 4}, **fields)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text and len(deltas) > 1
    final = events[-1]
    assert final.type == "response.incomplete" and final.response.output_text == answer.output_text
    assert final.response.output[0].content == answer.output[0].content
    assert len(answer.output[0].content[0].logprobs) == NEW
    with client.responses.stream(model=NAME, input=ASKED, max_output_tokens=NEW) as stream:
        kept = [event.type for event in stream]
    assert kept.count("response.output_text.done") == 1


def test_messages_in_parts_and_earlier_calls(client: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "height", "arguments": '{"tree": "oak"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "user", "content": ASKED, "name": "me"},
    ]
    prompt = f"@system=a b\n@assistant=sooak\n@tool=5\n{ASKED}!"
    fields = {"messages": messages, "extra_body": {"chat_template_kwargs": {"closing": "!"}}}
    assert texts(chat(client, **fields)) == [expected(prompt, NEW)]
    items = [
        {"role": "developer", "content": "a b"},
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "1", "name": "height", "arguments": '{"tree": "oak"}'},
        {"type": "function_call_output", "call_id": "1", "output": "5"},
        {"role": "user", "content": ASKED},
    ]
    answer = respond(client, input=items, extra_body={"chat_template_kwargs": {"closing": "!"}})
    assert answer.output_text == expected(prompt, NEW)


def test_tools_are_in_the_prompt_unless_none_is_to_be_called(client: Any) -> None:
    tool = {"name": "height", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    counts = [
        chat(client, **fields).usage.prompt_tokens
        for fields in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"})
    ]
    assert counts[0] == counts[2] < counts[1]
    answer = respond(client, tools=[{"type": "function", **tool}])
    assert answer.usage.input_tokens == counts[1] and answer.tools[0].name == "height"


def test_tokens_of_a_prefix_are_counted(client: Any) -> None:
    prompt = "@ash=4410 @fir=7719 ?fir="
    first = complete(client, prompt=prompt, extra_body={"ignore_eos": True})
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    further = prompt + first.choices[0].text + "\n?ash="
    held = len(tokenizer()(prompt).input_ids) + NEW - 1
    second = complete(client, prompt=further, n=2)
    assert second.usage.prompt_tokens_details.cached_tokens == held
    # all but the last token is kept of this one, which leaves nothing to be computed before its answers part
    assert complete(client, prompt=further, n=2).choices == second.choices
    answer = respond(client, input=further)
    assert answer.usage.input_tokens_details.cached_tokens >= held


def test_the_model_by_its_name(client: Any) -> None:
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    for ask in (lambda: client.models.retrieve("gpt"), lambda: chat(client, model="gpt")):
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist") as caught:
            ask()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_request_that_never_fits(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="max_bytes") as caught:
        chat(client, max_tokens=10**9)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.slow
def test_an_engine_that_fails_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running, served(build_app(NAME, model(), tokenizer(), running)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            step, steps = running._generation_step, []

            def failing() -> None:
                steps.append(None)
                if len(steps) > 10:
                    raise RuntimeError("the device is lost")
                step()

            monkeypatch.setattr(running, "_generation_step", failing)
            with pytest.raises(openai.APIError, match="the device is lost"):
                for _ in chat(client, stream=True, max_tokens=100, extra_body={"ignore_eos": True}):
                    pass
            with pytest.raises(openai.InternalServerError, match="the device is lost"):
                respond(client)


@pytest.mark.slow
def test_a_failed_response_is_numbered_like_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running, served(build_app(NAME, model(), tokenizer(), running)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            stream = respond(client, stream=True, max_output_tokens=300, extra_body={"ignore_eos": True})
            events = [next(stream) for _ in range(6)]

            def failing() -> None:
                raise RuntimeError("the device is lost")

            monkeypatch.setattr(running, "_generation_step", failing)
            events += stream
    assert events[-1].type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_invalid_response_template_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    loaded = copy.deepcopy(tokenizer())
    loaded.response_template = {"fields": {"content": {"content": "unknown"}}}
    with engine() as running, served(build_app(NAME, model(), loaded, running)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as asking:
            messages = [{"role": "user", "content": "oak"}]
            answer = asking.chat.completions.create(model=NAME, messages=messages, max_tokens=4, temperature=0)
    assert answer.choices[0].message.content == expected("oak", 4)
    assert [each.getMessage() for each in caplog.records if "response_template is invalid" in each.getMessage()]


def test_a_prompt_is_parsed_once_for_all_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("hf_diffkv_serving.server.chat")
    build, parsed = module.build_response_parser, []

    def counted(processor: Any, model: Any, input_ids: list[int], tools: Any) -> Any:
        if input_ids:
            parsed.append(input_ids)
        return build(processor, model, input_ids, tools=tools)

    monkeypatch.setattr(module, "build_response_parser", counted)
    with engine() as running, served(build_app(NAME, model(), tokenizer(), running)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as asking:
            messages = [{"role": "user", "content": "oak"}]
            answer = asking.chat.completions.create(model=NAME, messages=messages, n=3, max_tokens=4, temperature=0)
    assert [choice.message.content for choice in answer.choices] == 3 * [expected("oak", 4)]
    assert len(parsed) == 1


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_nothing() -> None:
    with engine() as running, served(build_app(NAME, model(), tokenizer(), running)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            for fields in ({"n": 3}, {"n": 3, "stop": "never"}, {"prompt": [ASKED, "b"], "n": 2}):
                stream = complete(client, stream=True, max_tokens=300, extra_body={"ignore_eos": True}, **fields)
                next(iter(stream))
                stream.close()
            # ends by a stop string, which the engine learns of afterwards
            complete(client, stop=expected(ASKED, NEW)[:2])
            deadline = time.monotonic() + 60
            while running.memory().requests or running.output_router.result_handlers:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert running.memory().free_share == 1 and not running.records._open
            assert running.output_router.output_queue.empty()
