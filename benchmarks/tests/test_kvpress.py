"""kvpress in its own environment: its presses on the same documents, measured by the tokens they keep."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.records import Record, RunFolder
from hf_diffkv.evaluation.session import Session
from hf_diffkv.evaluation.tasks import Document, get_task
from hf_diffkv.running.models import TINY_LM

LAYERS, HEADS, DIM, ITEMSIZE = 6, 2, 64, 4
TOKENS, CONTINUED = 900, 60
RATIO = 0.57
KEPT = int(TOKENS * (1 - RATIO))
PRESSES = (
    *("expected-attention", "keydiff", "knorm", "lagkv", "observed-attention"),
    *("pyramidkv", "random", "snapkv", "streaming-llm", "tova"),
)
LABELS = [*(f"kvpress:{press}+{RATIO}" for press in PRESSES), f"kvpress:snapkv+{RATIO}+window_size=16"]
NONE = [f"kvpress:{press}+0" for press in ("snapkv", "keydiff", "random", "pyramidkv", "adakv-snapkv")]
ADAKV = [f"kvpress:adakv-{press}+{RATIO}" for press in ("snapkv", "expected-attention")]
EAGER = "kvpress:observed-attention+0"
pytestmark = pytest.mark.usefixtures("peers")
# another name for the same method
AGAIN = f"kvpress:random+{RATIO}0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kvpress", "for example kvpress:snapkv+0.5"),
        ("kvpress:snapkv", "for example kvpress:snapkv+0.5"),
        ("kvpress:snapkv+0.5+0.5", "whole numbers of a press, window_size=16, not '0.5'"),
        ("kvpress:snapkv+0.5+window_size=x", "not 'window_size=x'"),
        ("kvpress:snap+0.5", "unknown press 'snap': did you mean snapkv"),
        ("kvpress:adakv-observed-attention+0.5", "unknown press 'adakv-observed-attention'"),
        ("kvpress:snapkv+half", "from 0 to below 1, not 'half'"),
        ("kvpress:snapkv+1", "from 0 to below 1, not '1'"),
        ("kvpress:snapkv+-0.1", "from 0 to below 1, not '-0.1'"),
        ("kvpress:snapkv+nan", "from 0 to below 1, not 'nan'"),
    ],
)
def test_a_press_that_is_none(text: str, said: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(said)):
        get_method(text)


def test_presses_by_name() -> None:
    for press in [*PRESSES, "adakv-snapkv"]:
        method = get_method(f"kvpress:{press}+0.25")
        assert (method.press, method.ratio, method.environment.name) == (press, 0.25, "kvpress")
    assert get_method("kvpress:snapkv+0.25+window_size=16").numbers == {"window_size": 16}


def test_sliding_windows_are_refused(gemma: Any) -> None:
    with pytest.raises(ValueError, match="sliding-window layers"):
        get_method("kvpress:snapkv+0.5").new_cache(gemma)


def recall(tokenizer: Any) -> Document:
    """Returns a document with facts between lines of code that tiny-lm can recall."""
    text = (TINY_LM.parents[1] / "prompts" / "recall.txt").read_text()
    context = tokenizer(text).input_ids[:TOKENS]
    facts = re.findall(r"@(\w+)=(\d+)\n", tokenizer.decode(context))
    questions = tuple(
        (tuple(tokenizer(f"\n?{key}=").input_ids), tuple(tokenizer(value).input_ids)) for key, value in facts
    )
    return Document("recall-0", tuple(context), questions)


def code(tokenizer: Any) -> Document:
    ids = tokenizer((TINY_LM.parents[1] / "prompts" / "recall.txt").read_text()).input_ids
    return Document("code-0", tuple(ids[:TOKENS]), continuation=tuple(ids[TOKENS : TOKENS + CONTINUED]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, peers: ModuleType) -> RunFolder:
    environment = get_method(NONE[0]).environment
    if environment.find_python() is None:
        pytest.skip("the environment of kvpress has not been made: make kvpress")
    found = RunFolder(tmp_path_factory.mktemp("run"), {"model": str(TINY_LM), "dtype": "float32", "seed": 0})
    tasks = [(get_task("key-value"), [recall(tokenizer)]), (get_task("text"), [code(tokenizer)])]
    methods = [get_method(label) for label in [*LABELS, *NONE, *ADAKV, EAGER, AGAIN]]
    assert environment.run(methods, tasks, found, model=str(TINY_LM), device="cpu", quiet=True) == []
    return found


@pytest.fixture(scope="module")
def records(folder: RunFolder) -> dict[tuple[str, str], Record]:
    return {(record.task, record.method): record for record in folder.all_records()}


TASKS = ("key-value", "text")


def test_everything_ran(records: dict) -> None:
    assert {key: record.error for key, record in records.items()} == {
        (task, label): None for task in TASKS for label in [*LABELS, *NONE, *ADAKV, EAGER, AGAIN]
    }
    assert {record.environment["kvpress"] for record in records.values()} == {"0.5.5"}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("label", NONE)
def test_a_share_of_0_is_the_dense_cache(task: str, label: str, records: dict) -> None:
    record = records[task, label]
    assert record.bytes == record.dense_bytes == TOKENS * LAYERS * HEADS * 2 * DIM * ITEMSIZE
    assert not record.simulated
    kl, count = record.metrics["kl"]
    assert record.metrics["top1"] == [count, count]
    # AdaKV is asked one question at a time, which rounds differently
    assert kl <= (1e-6 * count if "adakv" in label and task == "key-value" else 0.0)


def test_its_dense_cache_is_ours(records: dict, tokenizer: Any) -> None:
    """Another Transformers gives the same distributions on the same documents."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    for task, document in (("key-value", recall(tokenizer)), ("text", code(tokenizer))):
        session = Session(model, get_method("dense"))
        sums, _, details = get_task(task).measure(session, document, None)
        found = records[task, NONE[0]]
        assert found.metrics["nll"] == pytest.approx(sums["nll"], rel=1e-5)
        assert found.dense_bytes == details["held"].bytes
        assert found.digest == document.digest


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("label", LABELS)
def test_bytes_are_those_of_the_tokens_kept(task: str, label: str, records: dict) -> None:
    record = records[task, label]
    assert record.bytes == KEPT * LAYERS * HEADS * 2 * DIM * ITEMSIZE
    assert record.payload_bytes == record.bytes and not record.simulated
    assert record.metrics["kl"][0] > 1e-3


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("label", ADAKV)
def test_hidden_tokens_count_as_removed(task: str, label: str, records: dict) -> None:
    record, uniform = records[task, label], records[task, label.replace("adakv-", "")]
    assert record.bytes == uniform.bytes and record.simulated
    assert record.metrics["kl"] != uniform.metrics["kl"]
    assert record.metrics["kl"][0] > 1e-3


def test_a_press_takes_its_numbers(records: dict) -> None:
    usual = f"kvpress:snapkv+{RATIO}"
    assert records["text", f"{usual}+window_size=16"].metrics["kl"] != records["text", usual].metrics["kl"]


def test_a_random_press_draws_the_same_again(records: dict) -> None:
    for task in TASKS:
        assert records[task, AGAIN].metrics == records[task, f"kvpress:random+{RATIO}"].metrics


def test_facts_are_lost(records: dict) -> None:
    right, known = records["key-value", NONE[0]].metrics["right"]
    assert right == known >= 3
    assert records["key-value", EAGER].metrics["right"] == [right, known]
    # presses that do not look at the facts, which stand out here
    for press in ("random", "streaming-llm"):
        assert records["key-value", f"kvpress:{press}+{RATIO}"].metrics["right"][0] < known


def test_it_goes_on_where_it_was(folder: RunFolder, tokenizer: Any) -> None:
    path = folder.folder / "environments" / "kvpress" / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    tasks = [(get_task("text"), [code(tokenizer)])]
    methods = [get_method(AGAIN)]
    assert methods[0].environment.run(methods, tasks, folder, model=str(TINY_LM), device="cpu", quiet=True) == []
    again = path.read_bytes().splitlines(keepends=True)
    assert again[:-1] == lines[:-1] and len(again) == len(lines)
