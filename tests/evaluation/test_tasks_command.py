"""`hf-diffkv evaluate` with tasks that generate: kinds of models, batches, sampling, suites, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat_models import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.cli import main
from hf_diffkv.evaluation.tasks import get_task, suites
from hf_diffkv.evaluation.tasks.base import Source

TWO = "dense,diffkv:lossless"
LENGTH = 500
TASK = ("--tasks", "ruler-niah-single-1", "--length", LENGTH)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("instruct"), "llama", "instruct")


def evaluate(model: Path, output: Path, *options: object) -> list[dict[str, Any]]:
    """Runs the command; the records."""
    arguments = ["evaluate", "--model", model, "--output", output, "--quiet", "--device", "cpu", *options]
    assert main([str(argument) for argument in arguments]) == 0
    records = [json.loads(line) for line in (output / "records.jsonl").read_text().splitlines()]
    assert [record["error"] for record in records] == [None] * len(records)
    return records


def texts(records: list[dict[str, Any]], method: str = "dense") -> dict[str, str]:
    return {record["document"]: record["details"]["text"] for record in records if record["method"] == method}


@pytest.mark.parametrize(
    ("model_type", "template"),
    [("llama", "plain"), ("llama", "instruct"), ("qwen2", "instruct"), ("qwen3", "hybrid"), ("qwen2", "thinking")],
)
@pytest.mark.sampled(100)
def test_kinds_of_models(model_type: str, template: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type, template)
    options = ("--methods", TWO, "--documents", 2, "--max-new-tokens", 8)
    records = evaluate(model, tmp_path / "run", *TASK, *options)
    assert len(records) == 2 * 2
    assert texts(records) == texts(records, "diffkv:lossless")
    # the model alone, on the prompt as its template gives it
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    documents = {d.name: d for d in get_task("ruler-niah-single-1").documents(Source(tokenizer, 2, LENGTH))}
    for record in records:
        document = documents[record["document"]]
        ids = torch.tensor([[*document.context, *document.questions[0][0]]])
        assert ("<|assistant|>" in tokenizer.decode(ids[0])) == (template != "plain")
        if record["method"] == "dense":
            written = loaded.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            assert record["details"]["text"] == tokenizer.decode(written, skip_special_tokens=True)
            layers, heads, head_dim = 2, 2, 32
            tokens = ids.shape[1] + len(written) - 1
            assert record["bytes"] == record["dense_bytes"] == 2 * layers * heads * head_dim * 4 * tokens


def test_batches_change_nothing(tmp_path: Path, instruct: Path) -> None:
    options = (
        *("--methods", f"{TWO},quanto:4", "--tasks", "ruler-niah-single-1,ruler-niah-multikey-2"),
        *("--documents", 3, "--length", LENGTH, "--max-new-tokens", 12),
    )
    alone = evaluate(instruct, tmp_path / "alone", *options)
    batched = evaluate(instruct, tmp_path / "batched", *options, "--batch-size", 2)
    for method in (*TWO.split(","), "quanto:4"):
        assert texts(batched, method) == texts(alone, method) and len(texts(alone, method)) == 6
    key = lambda record: (record["method"], record["document"])  # noqa: E731
    for mine, theirs in zip(sorted(batched, key=key), sorted(alone, key=key)):
        assert mine["metrics"] == theirs["metrics"] and mine["dense_bytes"] == theirs["dense_bytes"]
        assert mine["digest"] == theirs["digest"]


@pytest.mark.parametrize("batch_size", [1, 5])
def test_bytes_are_those_of_as_many_tokens(tmp_path: Path, batch_size: int) -> None:
    model = save_model(tmp_path / "model", "llama", "instruct")
    config = json.loads((model / "generation_config.json").read_text())
    # many bytes end the text, so that methods end it at different lengths
    (model / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": list(range(0, 256, 16))}))
    options = (*TASK, "--documents", 5, "--max-new-tokens", 60, "--batch-size", batch_size)
    records = evaluate(model, tmp_path / "run", *options, "--methods", "dense,diffkv:K4V2+window=4")
    tokens = {(record["method"], record["document"]): record["details"]["tokens"] for record in records}
    assert len(set(tokens.values())) > 3
    assert any(tokens["dense", name] != count for (_, name), count in tokens.items())
    layers, heads, head_dim = 2, 2, 32
    for record in records:
        assert record["dense_bytes"] == 2 * layers * heads * head_dim * 4 * record["details"]["tokens"]
    assert all(record["bytes"] == record["dense_bytes"] for record in records if record["method"] == "dense")


def test_a_batch_goes_on_where_a_run_ended(tmp_path: Path, instruct: Path) -> None:
    options = (*TASK, "--documents", 5, "--max-new-tokens", 6)
    whole = evaluate(instruct, tmp_path / "whole", *options, "--methods", TWO, "--batch-size", 5)
    records = tmp_path / "whole" / "records.jsonl"
    lines = records.read_text().splitlines()
    # the dense cache has all, the other one two of five
    records.write_text("\n".join(lines[:7]) + "\n")
    again = evaluate(instruct, tmp_path / "whole", *options, "--methods", TWO, "--batch-size", 5)
    assert len(again) == 10 and again[:7] == whole[:7]
    assert texts(again, "diffkv:lossless") == texts(whole, "diffkv:lossless")


def test_sampling_is_the_same_for_every_method(tmp_path: Path, instruct: Path) -> None:
    options = (*TASK, "--documents", 2, "--max-new-tokens", 20)
    greedy = evaluate(instruct, tmp_path / "greedy", *options, "--methods", "dense")
    before = torch.random.get_rng_state()
    sampled = evaluate(instruct, tmp_path / "sampled", *options, "--methods", TWO, "--sample")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert texts(sampled) == texts(sampled, "diffkv:lossless")
    assert not set(texts(sampled).values()) & set(texts(greedy).values())
    assert texts(sampled) == texts(evaluate(instruct, tmp_path / "again", *options, "--methods", "dense", "--sample"))
    other = evaluate(instruct, tmp_path / "other", *options, "--methods", "dense", "--sample", "--seed", 1)
    assert not set(texts(sampled).values()) & set(texts(other).values())


def refused(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    """The message of a command that is refused before it writes anything."""
    assert main(["evaluate", *map(str, options)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_refusals(tmp_path: Path, instruct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("--model", instruct, "--output", tmp_path / "run", "--methods", "dense")
    assert "'--batch-size': 0 is too few" in refused(capsys, *run, *TASK, "--batch-size", 0)
    assert "'--max-new-tokens': 0 is too few" in refused(capsys, *run, *TASK, "--max-new-tokens", 0)
    long = refused(capsys, *run, *TASK, "--max-new-tokens", 4096)
    assert "max_position_embeddings is 4096; lower --length or --max-new-tokens" in long
    assert "there is no folder" in refused(capsys, "--model", tmp_path / "none" / "x", *run[2:])
    assert "did you mean ruler-niah-single-" in refused(capsys, *run, "--tasks", "ruler-niah-single-4")
    assert "lm-eval --model hf-diffkv" in refused(capsys, *run, "--tasks", "gsm8k")
    assert not (tmp_path / "run").exists()


def test_other_options_need_another_folder(tmp_path: Path, instruct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = (*TASK, "--documents", 1, "--methods", "dense")
    evaluate(instruct, tmp_path / "run", *run, "--max-new-tokens", 3)
    capsys.readouterr()
    message = refused(capsys, "--model", instruct, "--output", tmp_path / "run", *run, "--max-new-tokens", 4)
    assert "max_new_tokens=3, not 4" in message


def test_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "suite ruler: " + ", ".join(suites()["ruler"]) in lines
    # the default has nothing that generates long texts
    assert not any("ruler" in name for name in suites()["offline"])
