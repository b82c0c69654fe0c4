"""`hf-diffkv serve` in a process of its own: what clients get over HTTP, and what is left when they are gone."""

from __future__ import annotations

import functools
import importlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_diffkv_serving.compat import SERVER
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.running.models import TINY_LM

httpx = pytest.importorskip("httpx")
parts = pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)
from live_server import ENDLESS, PATIENCE, LiveServer  # noqa: E402

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}@{{ message.role }}={{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "tree_height", "parameters": {"type": "object", "properties": {}}}}
BUDGET, SLOTS, LONGEST, NEW = 12_000_000, 6, 1200, 6


class Server(LiveServer):
    """The command with all that it offers, and requests to it."""

    def __init__(self, folder: Path) -> None:
        (folder / "template.jinja").write_text(TEMPLATE)
        sizes = {"max-requests": SLOTS, "max-length": LONGEST, "max-batch-tokens": 96, "log-every": 0.2}
        prefixes = {"prefix-bytes": 4 << 20, "prefix-folder": folder / "prefixes", "prefix-folder-bytes": 64 << 20}
        given = {**sizes, **prefixes, "chat-template": folder / "template.jinja"}
        super().__init__(folder, *(f"--{name}={value}" for name, value in given.items()))

    def chat(self, text: str, max_tokens: int | None = NEW, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def stream_chat(self, text: str, **headers: str) -> Any:
        counts = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": NEW, **counts}
        return self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers)

    def long(self, **headers: str) -> Any:
        """A stream that goes on for as long as somebody reads it."""
        body = {"messages": [{"role": "user", "content": "a"}], **ENDLESS, "stream": True}
        return self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    running.process.kill()
    running.process.wait()


@functools.cache
def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(TINY_LM)
    loaded.chat_template = TEMPLATE
    return loaded


@functools.cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)


def expected(ids: list[int], new: int = NEW) -> str:
    """Returns the answer of `generate()` with Transformers' own cache."""
    output = model().generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)
    return tokenizer().decode(output[0, len(ids) :], skip_special_tokens=True)


def prompt_of(text: str, **options: Any) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)


def read(stream: Any) -> tuple[list[str], dict[str, Any]]:
    """Pieces of text, and the last chunk."""
    with stream as response:
        assert response.status_code == 200, response.read()
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]], chunks[-1]


def test_many_streaming_clients_get_what_generate_says(server: Server) -> None:
    texts = [f"@oak={5000 + 7 * i}" + " @elm=1177" * (i % 9) + f" ?oak=\n{'?elm=' * (i % 2)}" for i in range(32)]
    before = server.idle()
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: read(server.stream_chat(text)), texts))
    said = 0
    for text, (pieces, last) in zip(texts, answers):
        ids = prompt_of(text)
        assert "".join(pieces) == expected(ids)
        assert len(pieces) > 3 and last["usage"]["prompt_tokens"] == len(ids)
        said += last["usage"]["completion_tokens"]
    found = server.idle()
    assert found["generated_tokens"] - before["generated_tokens"] == said
    assert found["slots"] == SLOTS and found["longest"] == LONGEST
    assert found["max_bytes"] == BUDGET and found["held_bytes"] <= found["peak_bytes"] <= BUDGET


def test_tools_reach_the_template(server: Server) -> None:
    answer = server.chat("@oak=5305 ?oak=", tools=[TOOL]).json()
    ids = prompt_of("@oak=5305 ?oak=", tools=[TOOL])
    assert "tree_height" in tokenizer().decode(ids)
    assert answer["choices"][0]["message"]["content"] == expected(ids)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_other_routes(server: Server) -> None:
    prompt = "@oak=5305 @elm=1177 ?elm="
    ids = tokenizer()(prompt).input_ids
    body = {"prompt": prompt, "max_tokens": NEW, "model": "tiny-lm"}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected(ids)
    body = {"input": "@oak=5305 ?oak=", "max_output_tokens": NEW, "stream": False}
    output = server.client.post("/v1/responses", json=body).json()["output"]
    assert output[0]["content"][0]["text"] == expected(prompt_of("@oak=5305 ?oak="))
    assert [found["id"] for found in server.client.get("/v1/models").json()["data"]] == ["tiny-lm"]
    assert server.client.post("/reset").status_code == 404


def test_a_further_turn_computes_new_tokens_alone(server: Server) -> None:
    def ask(prompt: str) -> tuple[str, int]:
        before = server.idle()["prompt_tokens"]
        body = {"prompt": prompt, "max_tokens": NEW, "ignore_eos": True}
        text = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return text, server.idle()["prompt_tokens"] - before

    first, further = "@oak=5305 @elm=1177 @yew=9021 ?elm=", "\n?yew="
    kept = server.statistics()["prefixes"]["kept"]
    answer, computed = ask(first)
    ids = tokenizer()(first).input_ids
    assert computed == len(ids)
    text = first + answer + further
    _, computed = ask(text)
    held = len(ids) + NEW - 1
    assert computed == len(tokenizer()(text).input_ids) - held
    found = server.statistics()["prefixes"]
    assert found["tokens_reused"] == held and found["hits"]["device"] == 1 and found["kept"] > kept


def test_chats_with_one_system_message_share_it(server: Server) -> None:
    """Though all questions differ, and nobody asked it alone."""
    system = {"role": "system", "content": "Recall what you are told. " * 12}
    held = len(tokenizer()(f"@system={system['content']}\n@user=").input_ids)
    reused = []
    for question in ("What is oak?", "Say elm.", "A yew?"):
        messages = [system, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": NEW}
        usage = server.client.post("/v1/chat/completions", json=body).json()["usage"]
        reused.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert reused[0] == 0 and held - 3 <= reused[1] == reused[2] <= held


def test_clients_that_go_away_free_their_pages(server: Server) -> None:
    """While they read, while they wait for a whole answer, and while they wait for room."""
    before = server.idle()
    reading = [server.long() for _ in range(SLOTS - 1)]
    # a connection is closed with what reads from it
    lines = [stream.__enter__().iter_lines() for stream in reading]
    assert all(next(each) for each in lines)
    body = {"prompt": "a", **ENDLESS}
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE, read=0.3))
    waiting = [server.long() for _ in range(SLOTS)]
    for stream in waiting:
        stream.__enter__()

    def busy() -> bool:
        found = server.statistics()
        return found["requests"] == SLOTS and found["waiting"] > 0 and found["free_share"] < 1

    server.until(busy)
    for stream in reading + waiting:
        stream.__exit__(None, None, None)
    said = server.idle()["generated_tokens"] - before["generated_tokens"]
    assert 0 < said < ENDLESS["max_tokens"]


def test_what_has_no_room_is_refused_with_the_reason(server: Server) -> None:
    answer = server.chat("a", LONGEST)
    assert answer.status_code == 400
    reason = answer.json()["error"]["message"]
    assert f"{LONGEST} new ones" in reason and f"the longest possible request has {LONGEST} tokens" in reason
    answer = server.chat("a" * 2000)
    assert answer.status_code == 400 and "shorten the prompt" in answer.json()["error"]["message"]
    with server.stream_chat("a" * 2000) as response:
        assert response.status_code == 400
    # who does not say how much gets what there is room for
    text = "a" * (LONGEST - len(prompt_of("")) - 3)
    answer = server.chat(text, None).json()
    assert answer["usage"]["prompt_tokens"] == LONGEST - 3
    assert answer["usage"]["completion_tokens"] <= 4
    server.idle()


def test_names_that_do_not_go(server: Server) -> None:
    answer = server.chat("a", model="gpt")
    assert answer.status_code == 404 and "tiny-lm" in answer.json()["error"]["message"]
    with server.long(**{"x-request-id": "mine"}) as response:
        lines = response.iter_lines()
        assert next(lines)
        with server.stream_chat("b", **{"x-request-id": "mine"}) as second:
            assert second.status_code == 409 and "'mine'" in second.read().decode()
        # the first one has its stream still
        assert any("content" in line for line, _ in zip(lines, range(4)))
    server.idle()


def test_a_release_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SERVER.missing() == []
    from transformers.cli.serving import utils

    monkeypatch.setattr(utils, "build_response_parser", lambda processor, model: None)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0")
    monkeypatch.delitem(sys.modules, parts.__name__)
    with pytest.raises(ImportError, match=r"5\.99\.0 changed utils\.build_response_parser"):
        importlib.import_module(parts.__name__)


def test_it_says_what_it_does_until_it_is_interrupted(server: Server) -> None:
    server.chat("@oak=5305 ?oak=")
    server.until(lambda: re.search(r"in flight, \d+ waiting; .* of 12\.0 MB held", server.errors.read_text()))
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0
    # for the next process
    assert any((server.errors.parent / "prefixes").iterdir())
    assert server.errors.read_text().endswith("stopped\n")
