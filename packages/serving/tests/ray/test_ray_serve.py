"""Ray Serve: the routes on replicas, where requests go, and what a client sees when its replica dies."""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.running.models import TINY_LM

pytest.importorskip(
    "ray.serve", reason="Ray is not installed: pip install -e 'packages/serving[ray]'", exc_type=ImportError
)
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from hf_diffkv_serving.ray.beginnings import beginnings  # noqa: E402
from hf_diffkv_serving.replicas import endpoint  # noqa: E402

from hf_diffkv.commands import load  # noqa: E402
from hf_diffkv.commands.options import choice_of  # noqa: E402

NEW = 6
# tokens of an answer that is cut short; tiny-lm would go on
LONG = 1400
PATIENCE = 240
pytestmark = pytest.mark.slow


@functools.cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


def expected(text: str) -> str:
    """Returns the answer of `generate()` with Transformers' own cache."""
    ids = tokenizer()(text).input_ids
    output = model().generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return tokenizer().decode(output[0, len(ids) :], skip_special_tokens=True)


def until(found: Callable[[], Any]) -> Any:
    for _ in range(PATIENCE * 10):
        if result := found():
            return result
        time.sleep(0.1)
    raise AssertionError("nothing came")


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[httpx.Client]:
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    # as the command would
    given = "--lossless --greedy --replicas=2 --dtype=float32 --device=cpu --max-bytes=12MB --prefix-bytes=64MB"
    parsed = load("serve").make_context("serve", ["tiny-lm", *given.split(), "--max-length=1700", "--grace=1"])
    options = SimpleNamespace(**parsed.params)
    endpoint_of_command = endpoint(options, choice_of(options), {"do_sample": False}, {})
    serve.run(endpoint_of_command)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        yield client
    serve.shutdown()


def complete(client: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": NEW, **fields})


def cached(response: httpx.Response) -> int:
    """Tokens of the prompt that the replica had before."""
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill(cluster: Any, replica: str) -> None:
    """The process that the header `x-replica` names."""
    name = f"SERVE_REPLICA::default#Replica#{replica}"
    cluster.kill(cluster.get_actor(name, namespace="serve"))


def replicas(client: httpx.Client) -> set[str]:
    """Returns the names of the replicas that answer."""
    return {complete(client, os.urandom(8).hex(), max_tokens=1).headers["x-replica"] for _ in range(16)}


def test_replicas_answer_as_generate_does(client: httpx.Client) -> None:
    texts = [f"@oak={5000 + 7 * i} ?oak=" for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda text: complete(client, text), texts))
    answers = [response.json()["choices"][0]["text"] for response in first]
    assert answers == [expected(text) for text in texts]
    assert len({response.headers["x-replica"] for response in first}) == 2
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny-lm"
    assert client.post("/v1/completions", json={"prompt": "a" * 2000}).status_code == 400
    assert client.get("/nothing").status_code == 404


def test_talks_stay_at_the_replica_that_holds_them(client: httpx.Client) -> None:
    # longer than a piece, so that a further turn begins as the one before
    texts = [f"@oak={6000 + 7 * i} " + "@elm=1177 " * 55 for i in range(12)]
    assert all(len(beginnings({"prompt": text})) == 2 for text in texts)
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda text: complete(client, text), texts))
        chosen = [response.headers["x-replica"] for response in first]
        assert len(set(chosen)) == 2 and not any(map(cached, first))
        answers = first
        for question in ("?elm=", "?oak="):
            held = [len(tokenizer()(text).input_ids) + NEW - 1 for text in texts]
            texts = [text + answer.json()["choices"][0]["text"] + question for text, answer in zip(texts, answers)]
            answers = list(pool.map(lambda text: complete(client, text), texts))
            assert [response.headers["x-replica"] for response in answers] == chosen
            assert [cached(response) for response in answers] == held


def test_a_stream_whose_replica_dies_ends_with_an_error(cluster: Any, client: httpx.Client) -> None:
    service = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    body = {"prompt": "a", "model": "tiny-lm", "stream": True, "max_tokens": LONG}
    with service.completions.with_streaming_response.create(**body) as raw:
        replica = raw.headers["x-replica"]
        lines = raw.iter_lines()
        assert "choices" in next(lines)
        kill(cluster, replica)
        last = [line for line in lines if line.startswith("data:")][-1]
    error = json.loads(last.removeprefix("data:"))["error"]
    assert error["message"] == "the replica that answered has ended; try again." and error["type"] == "server_error"
    # the library that clients use raises it
    stream = service.completions.create(**body)
    next(stream)
    until(lambda: replica not in (found := replicas(client)) and found)
    with pytest.raises(openai.APIError, match="has ended; try again"):
        for living in replicas(client):
            kill(cluster, living)
        list(stream)
    until(lambda: len(replicas(client)) == 2)


def test_an_answer_that_has_not_begun_is_given_by_another_replica(cluster: Any, client: httpx.Client) -> None:
    prompt = "@oak=5305 ?oak="
    with ThreadPoolExecutor() as pool:
        names = replicas(client)
        answer = pool.submit(complete, client, prompt, max_tokens=LONG)
        time.sleep(1)
        for name in names:
            kill(cluster, name)
        response = answer.result()
    assert response.status_code == 200 and response.headers["x-replica"] not in names
    assert response.json()["choices"][0]["text"].startswith(expected(prompt))
