"""The soak with a few requests and a restart; it finds what is lost, different or left over."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (5, 23),
    reason="this release batches otherwise",
)
httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
OPTIONS = ["--seconds=10", "--requests=60", "--prompts=6", "--longest=200", "--new-tokens=12"]


@pytest.mark.slow
def test_a_short_soak(script, documented, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output, folder = tmp_path / "soak.jsonl", tmp_path / "files"
    script("soak").main([*OPTIONS, "--output", str(output), "--folder", str(folder)])
    row = json.loads(output.read_text())
    assert row["wrong"] == 0 and row["first_wrong"] == []
    # those told to try again later are sent again
    later = sum(row["statuses"].get(status, 0) for status in ("429", "503"))
    assert row["sent"] == 60 + later == sum(row["kinds"].values())
    assert row["compared"] > 10 and row["generated_tokens"] > 60 and row["prompt_tokens"] > 600
    assert len(row["memory"]) == 2 and all(each["most"] > 100 for each in row["memory"])
    assert list((folder / "prefixes").iterdir())
    capsys.readouterr()
    report = ["--report", "--document", "--output", str(output)]
    text = documented(script("report_soak"), "soak", lambda: script("soak").main(report))
    assert "| lost, different, without an end, or otherwise wrong | 0 |" in text
    assert capsys.readouterr().out.strip() in text


def test_what_is_lost_is_found(script, tmp_path: Path) -> None:
    module = script("soak")
    outcomes = [script("soak_clients").Outcome("whole") for _ in range(3)]
    lines: list[dict[str, Any]] = [{"event": "request", "id": outcome.id, "status": 200} for outcome in outcomes]
    log = tmp_path / "log.jsonl"

    def faults(*others: dict[str, Any]) -> list[str]:
        log.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *others)))
        return module._log_faults(log, outcomes)

    assert faults({"event": "message", "message": "stopped"}, {"event": "log", "level": "warning"}) == []
    assert len(faults({"event": "log", "level": "error", "message": "Error in generation loop"})) == 1
    assert len(faults({"event": "request", "id": "another", "status": 500})) == 1
    assert faults(lines[0]) == ["whole has 2 lines"]
    lines.pop()
    assert faults() == ["whole has 0 lines"]
    log.write_text(log.read_text() + "Traceback (most recent call last):\n")
    assert len(module._log_faults(log, outcomes)) == 2


class Said:
    """Stands in for the reference, with one answer to every prompt."""

    def answer(self, prompt: Any, new_tokens: int) -> tuple[str, str]:
        return "5305", "length"


def sent(script, answer: Any, way: str, restarting: bool = False) -> Any:
    """Sends a prompt in `way` and returns the client's outcome for the server's given answers."""

    async def send() -> Any:
        prompt = script("soak_prompts").Prompt("a", False, 1, (5,))
        asking = script("soak_clients").Clients("http://here", [prompt], Said(), 100, 1, seed=0)
        asking._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here")
        asking.restarting = restarting
        return await asking.send(way)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("status", "content", "restarting", "wrong", "cut"),
    [
        (200, {"choices": [{"text": "5305", "finish_reason": "length"}]}, False, None, False),
        (200, {"choices": [{"text": "5306", "finish_reason": "length"}]}, False, "and not", False),
        (200, {"choices": [{"text": "5305", "finish_reason": "stop"}]}, False, "and not", False),
        (200, {"choices": [{"text": "53", "finish_reason": "length"}]}, False, "and not", False),
        (200, {"choices": [{"text": "53", "finish_reason": "length"}]}, True, None, True),
        (200, {"choices": [{"text": "5305", "finish_reason": None}]}, False, "without a reason", False),
        (200, {"choices": []}, False, "another form", False),
        (500, {"error": {"message": "it failed"}}, True, "500", False),
        (503, {"error": {"message": "stopping"}}, True, None, False),
        (503, {"error": {"message": "stopping"}}, False, "nobody stopped", False),
        (429, {"detail": "full"}, False, "without a reason", False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_found(
    script, status: int, content: Any, restarting: bool, wrong: str | None, cut: bool, stream: bool
) -> None:
    def answer(request: Any) -> Any:
        if status != 200 or not json.loads(request.content)["stream"]:
            return httpx.Response(status, json=content, headers={"retry-after": "1"})
        return httpx.Response(200, text=f"data: {json.dumps(content)}\n\ndata: [DONE]\n\n")

    outcome = sent(script, answer, "stream" if stream else "whole", restarting)
    if stream and content == {"choices": []}:
        wrong = "without a reason"
    assert (outcome.status, outcome.cut) == (status, cut)
    assert outcome.wrong is None if wrong is None else wrong in outcome.wrong


def test_a_stream_without_its_end_is_wrong(script) -> None:
    chunk = {"choices": [{"text": "5305", "finish_reason": "length"}]}
    reply = httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\n")
    assert "without its last event" in sent(script, lambda request: reply, "stream").wrong
