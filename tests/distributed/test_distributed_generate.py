"""The data-parallel example writes on several processes what it writes on one."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, launch, torchrun
from transformers import AutoTokenizer

from hf_diffkv import DiffKVCache, DiffKVConfig

SCRIPT = ROOT / "examples" / "distributed_generate.py"
TEXT = (ROOT / "examples" / "prompts" / "recall.txt").read_text().strip()
# pieces of different lengths, so that the order of the answers shows
PROMPTS = [TEXT[: 90 * number] for number in (4, 1, 3, 2, 5)]
# without --multi_gpu accelerate starts several processes on CPUs by MPI only
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"]

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(prompt.replace("\n", " ") for prompt in PROMPTS) + "\n\n")
    return path


def arguments(prompts: Path, output: Path) -> list[Any]:
    options = ["--max-new-tokens", "12", "--batch-size", "1", "--alpha-high", "2", "--alpha-low", "0.1", "--cpu"]
    return ["--prompts", prompts, "--output", output, *options]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("alone") / "answers.jsonl"
    printed = launch(SCRIPT, *arguments(prompts, output))
    answers = read(output)
    assert [answer["prompt"] for answer in answers] == prompts.read_text().split("\n")[:5]
    assert {answer["process"] for answer in answers} == {0} and "process 1 of 1" in printed
    assert all(answer["tokens"] == 12 and answer["cache_bytes"] < answer["dense_bytes"] for answer in answers[::2])
    return answers


def without_process(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in answer.items() if name != "process"} for answer in answers]


@pytest.mark.slow
def test_accelerate_launch(prompts: Path, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """Five prompts on two processes."""
    output = tmp_path / "answers.jsonl"
    printed = launch(*ACCELERATE, "--num_processes", "2", SCRIPT, *arguments(prompts, output))
    answers = read(output)
    assert without_process(answers) == without_process(alone)
    assert [answer["process"] for answer in answers] == [0, 0, 0, 1, 1]
    rows = re.findall(r"^ +(0|1|all) +(\d+) +(\d+) ", printed, re.MULTILINE)
    assert rows == [("0", "3", "36"), ("1", "2", "24"), ("all", "5", "60")]
    assert "process 1 of 2: 100%" in printed and "process 2 of 2" not in printed


@pytest.mark.slow
def test_more_processes_than_prompts(prompts: Path, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    single, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    single.write_text(json.dumps({"prompt": alone[0]["prompt"]}) + "\n")
    printed = torchrun(2, SCRIPT, *arguments(single, output))
    assert read(output) == alone[:1]
    assert re.search(r"^ +1 +0 +0 ", printed, re.MULTILINE)


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "no prompts"),
        ('{"text": "a"}', "JSON object"),
        ('{"prompt": "a"}\n{"prompt": [3]}', r"has \[3\] as a prompt"),
        ('{"prompt": null}', "has None as a prompt"),
        ('{"prompt": ""}', "has '' as a prompt"),
    ],
)
def test_files_without_prompts(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit, match=words):
        runpy.run_path(str(SCRIPT))["main"](list(map(str, arguments(path, tmp_path / "answers.jsonl"))))


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a")
    run = runpy.run_path(str(SCRIPT))["main"]
    monkeypatch.setitem(run.__globals__, "generate", lambda *arguments: pytest.fail("answers were computed"))
    for output, words in ((tmp_path, "is a folder"), (tmp_path / "none" / "a.jsonl", "there is no folder")):
        with pytest.raises(SystemExit, match=words):
            run(list(map(str, arguments(path, output))))


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_only_line_feeds_end_a_prompt(name: str, tmp_path: Path) -> None:
    prompts = ["one\u2028line", "two\x0c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) if name.endswith("l") else text for text in prompts]
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert runpy.run_path(str(SCRIPT))["read_prompts"](path) == prompts


def test_tokens_and_bytes_are_those_of_answers_and_measured_heads(smollm2: Path, tmp_path: Path) -> None:
    """The answers of a batch end at different lengths, and the cache is that of the model by default."""
    chats = [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("Say yes.", "Describe the sea.")
    ]
    path, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    run = runpy.run_path(str(SCRIPT))["main"]
    given: list[DiffKVConfig] = []

    def new_cache(model: Any, **fields: Any) -> DiffKVCache:
        cache = DiffKVCache(model, **fields)
        given.append(cache.config)
        return cache

    run.__globals__["DiffKVCache"] = new_cache
    run(["--model", str(smollm2), "--prompts", str(path), "--output", str(output), "--max-new-tokens", "24", "--cpu"])
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    short, long = read(output)
    assert short["tokens"] == len(tokenizer(short["text"]).input_ids) + 1 < 24
    assert long["tokens"] == len(tokenizer(long["text"]).input_ids) == 24
    (config,) = given
    assert config.head_precisions is not None
