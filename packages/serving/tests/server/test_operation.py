"""A server in this process: keys, limits, metrics, health, and a line for each request."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from batching import LOSSLESS, chunks, request_config
from live_server import ENDLESS, ROOT, events

pytest.importorskip("httpx")
pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)
from hf_diffkv_serving.server import run, under_way  # noqa: E402
from hf_diffkv_serving.server.completions import CompletionAnswer  # noqa: E402
from hf_diffkv_serving.server.logs import ServerLog  # noqa: E402
from hf_diffkv_serving.server.operation import Operation  # noqa: E402
from operated_server import NEW, PATIENCE, PROMPT, Client, model  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402


@pytest.mark.slow
def test_metrics_and_lines(served: Callable) -> None:
    async def use(client: Client) -> None:
        whole = await client.complete(headers={"x-request-id": "mine"})
        assert whole.headers["x-request-id"] == "mine"
        said = whole.json()["usage"]
        streamed = events((await client.complete(stream=True)).text.splitlines())
        text = whole.json()["choices"][0]["text"]
        further = await client.complete(prompt=PROMPT + text + "\n?oak=")
        assert (await client.complete(10**6)).status_code == 400
        assert (await client.get("/v1/models")).status_code == 200
        await client.idle()
        found = await client.metrics()
        assert len(streamed) > NEW / 2
        held = said["prompt_tokens"] + NEW - 1
        computed = 2 * said["prompt_tokens"] + further.json()["usage"]["prompt_tokens"] - 2 * held
        # the second request has all but the last token of the first one's prompt
        lines = client.lines()
        reused = [line["cached_tokens"] for line in lines]
        assert reused == [0, 0, held, 0, 0]
        assert found["hf_diffkv_prompt_tokens_total",] == computed + held
        assert found["hf_diffkv_generated_tokens_total",] == 3 * NEW
        assert found["hf_diffkv_requests_finished_total", "length"] == 3
        assert found["hf_diffkv_http_requests_total", "/v1/completions", "200"] == 3
        assert found["hf_diffkv_http_requests_total", "/v1/completions", "400"] == 1
        assert found["hf_diffkv_http_requests_total", "/v1/models", "200"] == 1
        for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
            assert found[f"hf_diffkv_{name}_seconds_count",] == 3
        whole, each, first = (
            found[f"hf_diffkv_{name}_seconds_sum",]
            for name in ("request_duration", "time_per_output_token", "time_to_first_token")
        )
        assert 0 < first < first + (NEW - 1) * each <= whole * (1 + 1e-9)
        assert found["hf_diffkv_prefix_hits_total", "device"] == 1
        assert found["hf_diffkv_prefix_tokens_reused_total",] == held
        assert found["hf_diffkv_prefix_disk_errors_total",] == 0
        memory = client.engine.memory()
        assert found["hf_diffkv_cache_held_bytes",] == memory.held_bytes
        assert found["hf_diffkv_cache_peak_bytes",] == memory.peak_bytes
        assert found["hf_diffkv_cache_max_bytes",] == memory.max_bytes
        assert found["hf_diffkv_pages_free_ratio",] == 1 and found["hf_diffkv_pages_used_ratio",] == 0
        assert found["hf_diffkv_requests_running",] == found["hf_diffkv_requests_waiting",] == 0
        assert found["hf_diffkv_engine_up",] == 1 and found["process_resident_memory_bytes",] > 1e8
        first = lines[0]
        assert (first["id"], first["status"], first["finish_reason"]) == ("mine", 200, "length")
        assert first["prompt_tokens"] == said["prompt_tokens"] and first["generated_tokens"] == NEW
        assert 0 < first["first_token_seconds"] < first["seconds"]
        assert "finish_reason" not in lines[3] and lines[3]["status"] == 400

    served(use, prefixes=True)


@pytest.mark.slow
def test_what_is_under_way_is_counted(served: Callable) -> None:
    async def use(client: Client) -> None:
        tasks = [client.endless() for _ in range(3)]
        await client.until(lambda: client.engine.statistics().generated_tokens > 20)
        found = await client.metrics()
        assert found["hf_diffkv_requests_running",] == 2 and found["hf_diffkv_slots",] == 2
        assert found["hf_diffkv_requests_waiting",] == 1
        assert 0 < found["hf_diffkv_pages_used_ratio",] < 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await client.idle()
        assert (await client.metrics())["hf_diffkv_requests_finished_total", "cancelled"] == 3
        assert [line["status"] for line in client.lines()] == [499] * 3

    served(use, requests=2)


def test_an_id_is_free_once_its_answer_is_there(served: Callable) -> None:
    async def use(client: Client) -> None:
        ask = functools.partial(client.complete, None, **{**ENDLESS, "stop": list("0123456789")})
        end, loop = client.engine.end_request, asyncio.get_running_loop()
        # an engine in the midst of a long forward
        client.engine.end_request = lambda *arguments: loop.call_later(0.2, end, *arguments)
        for n in (1, 3):
            first = await ask(headers={"x-request-id": "mine"}, n=n)
            again = await ask(headers={"x-request-id": "mine"}, n=n)
            assert first.status_code == again.status_code == 200, again.text
            reasons = [choice["finish_reason"] for choice in first.json()["choices"]]
            assert again.json()["choices"] == first.json()["choices"] and reasons == ["stop"] * n
        for name in ("a__child#0", "__child#"):
            refused = await ask(headers={"x-request-id": name})
            assert refused.status_code == 400 and "'__child#' in it; choose another" in refused.text
        await client.idle()

    served(use)


def test_the_key(served: Callable) -> None:
    async def use(client: Client) -> None:
        for given in (None, "Bearer wrong", "Bearer secret!", "secret", "Bearer sécret"):
            headers = {} if given is None else {"authorization": given.encode()}
            for path in ("/v1/models", "/diffkv", "/metrics"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"
        assert (await client.get("/health")).json() == {"status": "ok"}
        right = {"authorization": "Bearer secret"}
        assert (await client.complete(headers=right)).status_code == 200
        assert (await client.get("/metrics", headers=right)).status_code == 200

    served(use, api_key="secret")


def test_pages_of_any_origin(served: Callable) -> None:
    """They learn why they are refused, and may ask whether they may send the key."""

    async def use(client: Client) -> None:
        origin = {"origin": "http://there"}
        refused = await client.complete(headers=origin)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "*"
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        asked = await client.options("/v1/completions", headers={**origin, **wanted})
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "*"
        answer = await client.complete(headers={**origin, "authorization": "Bearer secret"})
        assert answer.status_code == 200 and answer.headers.get_list("access-control-allow-origin") == ["*"]

    served(use, cors=True, api_key="secret")


@pytest.mark.slow
def test_metrics_without_a_key(served: Callable) -> None:
    async def use(client: Client) -> None:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/diffkv")).status_code == 401

    served(use, api_key="secret", open_metrics=True)
    assert "secret" not in repr(Operation(api_key="secret"))


def test_a_body_that_is_too_large(served: Callable) -> None:
    """Refuses it by the length in the header, or without one by the bytes that come."""
    most = 200
    body = json.dumps({"prompt": PROMPT, "max_tokens": NEW}).encode().ljust(most)

    async def pieces(content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), 64):
            yield content[start : start + 64]

    async def use(client: Client) -> None:
        headers = {"content-type": "application/json"}
        for sent in (lambda content: content, pieces):
            for content, status in ((body, 200), (body + b" ", 413), (body * 100, 413), (body, 200)):
                answer = await client.post("/v1/completions", content=sent(content), headers=headers)
                assert answer.status_code == status
                if status == 413:
                    error = answer.json()["error"]
                    assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_large")
                    assert "200 bytes" in error["message"]
        assert not client.served.under_way.answers
        assert [line["status"] for line in client.lines()] == [200, 413, 413, 200] * 2

    served(use, max_body=most)


def test_others_are_answered_while_a_text_is_tokenised(served: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    tokenise = CompletionAnswer._ids

    def slow(answer: Any, prompt: str, place: int) -> list[int]:
        if prompt == "a long text":
            began.set()
            assert go_on.wait(10)
        return tokenise(answer, prompt, place)

    async def use(client: Client) -> None:
        late = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a long text", "max_tokens": NEW}))
        await client.until(began.is_set)
        assert (await client.get("/health")).status_code == 200
        assert (await client.complete()).status_code == 200
        assert not late.done()
        go_on.set()
        assert (await late).status_code == 200

    monkeypatch.setattr(CompletionAnswer, "_ids", slow)
    served(use)


@pytest.mark.slow
def test_time_is_up(served: Callable) -> None:
    """Whole answers get 504; streams what there is, a reason and an end; one that waits as well."""

    async def use(client: Client) -> None:
        whole, stream, waits = client.endless(), client.endless(stream=True), client.endless()
        answer = await whole
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert answer.json()["error"]["type"] == "server_error"
        assert (await waits).status_code == 504
        answer = await stream
        assert answer.status_code == 200
        choices = [each["choices"][0] for each in events(answer.text.splitlines()) if each != "[DONE]"]
        assert len(choices) > 2
        assert choices[-1]["finish_reason"] is not None
        await client.idle()
        found = await client.metrics()
        assert found["hf_diffkv_requests_finished_total", "timeout"] == 3
        assert found["hf_diffkv_http_requests_total", "/v1/completions", "504"] == 2
        assert {line["finish_reason"] for line in client.lines()} == {"timeout"}
        # who is in time is not touched
        assert (await client.complete()).status_code == 200

    served(use, requests=2, timeout=1.5)


@pytest.mark.slow
def test_a_stream_gets_its_end_behind_a_slow_forward(served: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "LAST_EVENTS", 0.2)

    async def use(client: Client) -> None:
        step, waits, go_on = client.engine._generation_step, threading.Event(), threading.Event()

        def slow() -> None:
            step()
            if client.engine.statistics().generated_tokens > 9:
                waits.set()
                go_on.wait(PATIENCE)

        monkeypatch.setattr(client.engine, "_generation_step", slow)
        stream = client.endless(stream=True)
        await client.until(waits.is_set)
        client.served.under_way.end_all()
        await asyncio.sleep(1)
        assert not stream.done()
        go_on.set()
        assert events((await stream).text.splitlines())[-1] == "[DONE]"

    served(use)


@pytest.mark.slow
def test_an_engine_that_fails(served: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the device is lost"

    async def use(client: Client) -> None:
        step, steps = client.engine._generation_step, []

        def failing() -> None:
            steps.append(None)
            if len(steps) > 10:
                raise RuntimeError(reason)
            step()

        monkeypatch.setattr(client.engine, "_generation_step", failing)
        under_way = await client.endless()
        assert under_way.status_code == 503 and reason in under_way.text
        await client.until(lambda: client.served.health.failure)
        later, health = await client.complete(), await client.get("/health")
        assert later.status_code == 503 and reason in later.json()["error"]["message"]
        assert health.status_code == 503 and health.json()["status"] == "engine_failed"
        assert reason in health.json()["reason"]
        found = await client.metrics()
        assert found["hf_diffkv_engine_up",] == 0 and found["hf_diffkv_engine_failures_total",] == 1
        assert found["hf_diffkv_requests_finished_total", "error"] == 1
        assert found["hf_diffkv_http_requests_total", "/v1/completions", "503"] == 2
        assert [line.get("finish_reason") for line in client.lines()] == ["error", None]

    served(use)


@pytest.mark.slow
def test_a_server_that_stops(served: Callable) -> None:
    async def use(client: Client) -> None:
        whole, stream = client.endless(), client.endless(stream=True)
        await client.until(lambda: client.engine.statistics().generated_tokens > 9)
        client.served.health.drain()
        answer = await client.complete()
        assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 8
        assert answer.json()["error"]["code"] == "draining"
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "draining"
        assert (await client.metrics())["hf_diffkv_draining",] == 1
        assert not whole.done() and not stream.done()
        client.served.under_way.end_all()
        answer = await whole
        assert answer.status_code == 503 and "before the answer was complete" in answer.json()["error"]["message"]
        last = events((await stream).text.splitlines())
        assert [each for each in last if each != "[DONE]"][-1]["choices"][0]["finish_reason"] is not None
        await client.idle()
        assert {line.get("finish_reason") for line in client.lines()} == {None, "shutdown"}
        assert not client.served.under_way.answers

    served(use, grace=7)


LOWERING = [f"hf_diffkv_{name}" for name in ("tokens_precise_ratio", "tokens_lowered_total", "room_tokens")]


def test_a_server_that_stops_within_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of its clients is closed before the engine drops their requests."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(run.logging, "set_verbosity", lambda level: None)
    engine = model().init_continuous_batching(request_config(LOSSLESS), chunks())
    begun, over = threading.Event(), threading.Event()

    def wait(*given: Any) -> None:
        begun.set()
        assert over.wait(PATIENCE)

    async def ask() -> None:
        engine.register_result_handler("a", lambda output: None)
        engine.add_request([3, 4, 5], "a", max_new_tokens=400)
        await asyncio.to_thread(begun.wait, PATIENCE)

    def serve(server: Any, sockets: Any) -> None:
        asyncio.run(ask())
        over.set()

    monkeypatch.setattr(run.Server, "run", serve)
    hook = model().register_forward_pre_hook(wait)
    run.run(None, engine, None, Operation(log_every=0), ServerLog(quiet=True))
    hook.remove()
    assert not failed and engine.failure is None


def test_all_metrics_are_documented(served: Callable) -> None:
    table = re.search(r"<!-- metrics -->\n(.*?)<!-- end -->", (ROOT / "docs" / "operating.md").read_text(), re.DOTALL)[
        1
    ]
    documented = {
        (name, kind)
        for names, kind, _ in re.findall(r"^\| (.+?) \| (\w+) \| (.+) \|$", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)", names)
    }

    async def use(client: Client) -> None:
        answer = await client.get("/metrics")
        families = text_string_to_metric_families(answer.text)
        there = {
            (f"{each.name}_total" if each.type == "counter" else each.name, each.type)
            for each in families
            if each.name.startswith("hf_diffkv_")
        }
        # those of lowering are there where heads are lowered
        lowering = {each for each in documented if each[0] in LOWERING}
        assert len(lowering) == len(LOWERING) and there == documented - lowering

    served(use, prefixes=True)
