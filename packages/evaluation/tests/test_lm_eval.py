"""The model for lm-evaluation-harness: a small task of its own, without the Hub."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.cli import main
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods.dense import DenseMethod
from hf_diffkv.evaluation.tasks import HARNESS_TASKS, harness_task

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from hf_diffkv_evaluation.lm_eval import DiffKVLM, method_name, register  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TINY_LM = Path(__file__).parents[3] / "examples" / "models" / "tiny-lm"
LENGTHS = (150, 400, 260)
ANSWER = 4
LOSSLESS = "diffkv:lossless"


def prompts() -> list[tuple[str, str]]:
    """Facts, a question about the first of them, and the answer, of very different lengths."""
    rng = random.Random(0)
    found = []
    for length in LENGTHS:
        facts = {"".join(rng.choices("abcdefgh", k=3)): f"{rng.randrange(10**4):04d}" for _ in range(length // 12)}
        text = "".join(f"@{key}={value}\n    some filler text\n" for key, value in facts.items())[:length]
        key, value = next(iter(facts.items()))
        found.append((f"{text}\n?{key}=", value))
    return found


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task that generates and one that scores choices."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [{"prompt": text, "answer": answer, "choices": [answer, "12"]} for text, answer in prompts()]
    (folder / "facts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "facts.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    generating = {
        "task": "facts_written",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": ANSWER, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    scoring = {
        "task": "facts_scored",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (generating, scoring):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


def evaluate(tasks: Path, task: str, cache: str, batch_size: int = 1, **fields: Any) -> dict[str, Any]:
    register()
    arguments = {"pretrained": str(TINY_LM), "cache": cache, "dtype": "float32", **fields}
    return lm_eval.simple_evaluate(
        model="hf-diffkv",
        model_args=arguments,
        tasks=[task],
        device="cpu",
        batch_size=batch_size,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )


def texts(results: dict[str, Any]) -> list[str]:
    return [sample["resps"][0][0] for sample in results["samples"]["facts_written"]]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Continuation of each prompt by itself, without the harness."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    found = []
    for text, _ in prompts():
        ids = torch.tensor([tokenizer(text).input_ids])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
        found.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0])
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("cache", ["dense", LOSSLESS])
@pytest.mark.sampled(100)
def test_a_lossless_cache_writes_what_the_dense_one_does(
    tasks: Path, expected: list[str], cache: str, batch_size: int
) -> None:
    results = evaluate(tasks, "facts_written", cache, batch_size)
    assert texts(results) == expected
    right = sum(text == answer for text, (_, answer) in zip(expected, prompts()))
    assert right > 0
    assert results["results"]["facts_written"]["exact_match,none"] == pytest.approx(right / len(LENGTHS))


def test_the_text_comes_from_the_cache(tasks: Path, expected: list[str]) -> None:
    results = evaluate(tasks, "facts_written", "diffkv:K1V1+window=1", batch_size=3)
    assert texts(results) != expected


def test_real_bytes_are_in_the_results(tasks: Path) -> None:
    dense = evaluate(tasks, "facts_written", "dense")["config"]["kv_cache"]
    # keys and values of 6 layers with 2 heads of 64, float32
    assert dense["bytes_per_token"] == 2 * 6 * 2 * 64 * 4
    assert dense["tokens"] > sum(len(text) for text, _ in prompts())
    coarse = evaluate(tasks, "facts_written", "diffkv", alpha_high=3, low="K4V4")["config"]["kv_cache"]
    assert coarse["method"] == "diffkv:alpha_high=3+low=K4V4"
    assert coarse["config"]["alpha_high"] == 3.0 and coarse["config"]["low"]["v_bits"] == 4
    assert coarse["tokens"] == dense["tokens"] and coarse["bytes"] < dense["bytes"] and not coarse["simulated"]


def test_log_likelihoods_are_refused(tasks: Path) -> None:
    with pytest.raises(EvaluationError, match=r"diffkv:K8V4 cannot answer log-likelihood requests \(facts_scored\)"):
        evaluate(tasks, "facts_scored", "diffkv:K8V4")
    assert 0 <= evaluate(tasks, "facts_scored", "dense")["results"]["facts_scored"]["acc,none"] <= 1


def test_a_budget_that_is_too_small_is_refused(tasks: Path) -> None:
    with pytest.raises(EvaluationError, match="cache=diffkv:max_bytes=1000: max_bytes=1000 cannot even hold"):
        evaluate(tasks, "facts_written", "diffkv:max_bytes=1000")


def test_rolling_log_likelihoods_are_refused() -> None:
    model = DiffKVLM(str(TINY_LM), cache="diffkv", device="cpu")
    with pytest.raises(EvaluationError, match="log-likelihood"):
        model.loglikelihood_rolling([])


@pytest.mark.skipif(not importlib.util.find_spec("optimum.quanto"), reason="optimum-quanto is not installed")
def test_other_methods_take_one_request_at_a_time(tasks: Path, expected: list[str]) -> None:
    # what is short enough stays uncompressed in a quantized cache's residual
    assert texts(evaluate(tasks, "facts_written", "quanto:4"))[0] == expected[0]
    with pytest.raises(EvaluationError, match="batch_size=2: a cache of 'quanto:4' holds one request"):
        evaluate(tasks, "facts_written", "quanto:4", batch_size=2)


def test_methods_of_other_environments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvaluationError, match="'kvpress' is measured by benchmarks/quality/peers.py in a checkout"):
        DiffKVLM("no-model", cache="kvpress:snapkv+0.5")
    monkeypatch.setattr(DenseMethod, "environment", SimpleNamespace(name="elsewhere"))
    with pytest.raises(EvaluationError, match="needs its own environment .elsewhere.; use benchmarks/quality"):
        DiffKVLM("no-model", cache="dense")


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"^windw is neither .* nor a field of .*; did you mean window\?"):
        DiffKVLM(str(TINY_LM), device="cpu", windw=3)
    with pytest.raises(EvaluationError, match=r"^zzz is neither .*; leave it out\."):
        DiffKVLM(str(TINY_LM), device="cpu", zzz=3)


def test_fields_become_options() -> None:
    assert method_name("dense", {}) == "dense"
    assert method_name("diffkv", {"alpha_high": 3, "high": "K8V8"}) == "diffkv:alpha_high=3+high=K8V8"
    assert method_name("diffkv:3/0", {"alpha_low": [0.1, 0.2]}) == "diffkv:3/0+alpha_low=[0.1, 0.2]"
    assert method_name("leankv:high_cut=0.3", {"window": 9}) == "leankv:high_cut=0.3+window=9"
    with pytest.raises(EvaluationError, match="window: options of cache=diffkv, not of cache=dense"):
        method_name("dense", {"window": 3})


def test_command(tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    # the harness has thousands of tasks, and listing them takes most of a minute
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    arguments = ["--model", "hf-diffkv", "--model_args", f"pretrained={TINY_LM},cache={LOSSLESS}", "--device", "cpu"]
    arguments += ["--include_path", str(tasks)]
    assert main(["lm-eval", *arguments, "--tasks", "facts_written", "--batch_size", "3"]) == 0
    assert "|facts_written|" in capsys.readouterr().out
    assert main(["lm-eval", *arguments, "--tasks", "facts_scored"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hf-diffkv: cache=diffkv:lossless cannot answer log-likelihood requests (facts_scored)")


HARNESS = Path(lm_eval.tasks.__file__).parent
DOCUMENT = Path(__file__).parents[3] / "docs" / "evaluation.md"
# what the table of the document names
FOLDERS = "gsm8k minerva_math benchmarks hendrycks_math aime mmlu mmlu_pro gpqa humaneval mbpp longbench ruler".split()


@pytest.mark.slow
def test_the_harness_has_the_documented_tasks() -> None:
    rows = [line.split("|") for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    (first,) = (index for index, row in enumerate(rows) if row[1].strip() == "task of the paper")
    named = {name for row in rows[first + 1 :] for name in re.findall(r"`([\w-]+)`", row[2])}
    manager = TaskManager(include_path=[HARNESS / folder for folder in FOLDERS], include_defaults=False)
    assert len(named) > 20 and named <= set(manager.all_tasks)
    # what `evaluate` refers to
    assert set(HARNESS_TASKS.values()) <= named
    sets = [name for name in manager.all_subtasks if name.startswith("longbench_") and not name.endswith("_e")]
    english = {name for name in sets if not name.endswith(("_zh", "dureader", "lsht", "vcsum"))}
    assert {harness_task(f"longbench-{name}") for name in OUR_LONGBENCH} == english


# the sets by the names that they had here
OUR_LONGBENCH = (
    *("qasper", "narrativeqa", "multifieldqa-en", "hotpotqa", "2wikimqa", "musique", "gov-report", "multi-news"),
    *("qmsum", "trec", "triviaqa", "samsum", "passage-count", "passage-retrieval-en", "lcc", "repobench-p"),
)
# by task of the harness: its file, and a row of the form of its data set
ROWS = {
    "gsm8k_cot_zeroshot": (
        "gsm8k/gsm8k-cot-zeroshot",
        {"question": "What are 3 and 4?", "answer": "3 + 4\n#### 7"},
    ),
    "hendrycks_math_algebra": (
        "hendrycks_math/hendrycks_math_algebra",
        {"problem": "What is $3+4$?", "level": "1", "type": "Algebra", "solution": r"It is $\boxed{7}$."},
    ),
    "aime24": ("aime/aime24", {"Problem": "How many are 3 and 4?", "Answer": 7}),
    "mmlu_astronomy_flan": (
        "mmlu/flan_cot_zeroshot/mmlu_astronomy",
        {"question": "Which is a star?", "choices": ["Mars", "Vega", "Io", "Pluto"], "answer": 1},
    ),
    "mmlu_pro_law": (
        "mmlu_pro/mmlu_pro_law",
        {"question": "Which letter?", "options": ["x", "y"], "answer": "A", "answer_index": 0}
        | {"cot_content": "", "category": "law"},
    ),
    "gpqa_diamond_cot_zeroshot": (
        "gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot",
        {"Question": "What?", "Correct Answer": "y"} | {f"Incorrect Answer {n}": f"n{n}" for n in (1, 2, 3)},
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sampled(100)
def test_tasks_of_the_harness(name: str, tmp_path: Path) -> None:
    """Its wording and scoring, on a row of its data set's form: a lossless cache writes what the dense one does."""
    file, row = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    splits = dict.fromkeys(("train", "validation", "dev", "test"), str(tmp_path / "rows.jsonl"))
    task = {
        "include": str(HARNESS / f"{file}.yaml"),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": splits, "cache_dir": str(tmp_path / "cache")},
        "num_fewshot": 0,
        "generation_kwargs": {"until": ["Q:"], "max_gen_toks": 8, "do_sample": False},
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    written = []
    for cache in ("dense", LOSSLESS):
        results = evaluate(tmp_path, name, cache)
        assert any(metric.startswith("exact_match") for metric in results["results"][name])
        written.append(results["samples"][name][0]["resps"])
    assert written[0] == written[1] and written[0][0][0]


def test_help_says_what_the_cache_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lm-eval", "--help"])
    printed = capsys.readouterr().out
    assert "cache=METHOD" in printed and "FIELD=VALUE" in printed and "usage: lm-eval" in printed
    assert printed.startswith("The model hf-diffkv is the harness's hf with a cache that you choose.")


def test_help_loads_no_pytorch() -> None:
    program = (
        "import sys; from hf_diffkv.cli import main\n"
        "try:\n    main(['lm-eval', '--help'])\n"
        "finally:\n    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    places = (Path(__file__).parents[3], Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "AssertionError" not in result.stderr, result.stderr[-2000:]


def test_an_unknown_task_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "hf-diffkv", "--model_args", f"pretrained={TINY_LM}", "--tasks", "no_such_task"]
    assert main(["lm-eval", *given]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--tasks: the harness has no no_such_task; `hf-diffkv lm-eval ls tasks` lists all." in last
