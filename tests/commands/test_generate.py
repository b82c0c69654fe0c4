"""`hf-diffkv generate`: a real run end to end, its figures against an independent generation, and what it prints."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from greedy_jobs import greedy_job
from tiny_models import LATENT, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cli import main
from hf_diffkv.commands.generate import comparison, same_tokens, word_difference
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.comparison import Agreement
from hf_diffkv.plot.palette import LEVELS
from hf_diffkv.running import side_by_side as compare
from hf_diffkv.running.bitsandbytes_weights import give_back_memory
from hf_diffkv.running.models import TINY_LM
from hf_diffkv.running.peak import PeakMemory
from hf_diffkv.running.side_by_side import DIFFKV, DYNAMIC, FinishedRun, Job

PROMPT_FILE = TINY_LM.parents[1] / "prompts" / "recall.txt"
CONFIG = DiffKVConfig(alpha_high=2.0, alpha_low=0.5, window=32)
TURNS = ["@oak=5305\nkey_dim: int, value_dim: int\n" * 6 + "?oak=", "?elm=", "x"]


def job(cache: str) -> Job:
    return greedy_job(cache, TINY_LM, TURNS, 5, CONFIG.to_dict(), dtype="auto")


def generate_turns(cache) -> tuple[list[list[int]], int]:
    """Runs the turns by plain `generate()`, and returns the answers and the number of tokens the cache has seen."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_LM), AutoModelForCausalLM.from_pretrained(TINY_LM)
    text, generated = "", []
    for turn in TURNS:
        text += turn
        ids = tokenizer(text, return_tensors="pt")
        output = model.generate(**ids, **passing(cache), max_new_tokens=5, do_sample=False)[0]
        generated.append(output[ids.input_ids.shape[1] :].tolist())
        text = tokenizer.decode(output)
    return generated, len(text) - 1


def test_run_equals_plain_generation_with_diffkv() -> None:
    config = AutoModelForCausalLM.from_pretrained(TINY_LM).config
    cache = DiffKVCache(config, CONFIG)
    generated, seen = generate_turns(cache)
    run = compare.execute(job(DIFFKV))
    memory = cache.memory()
    assert run.generated == generated
    assert run.seen_tokens == seen
    assert run.prompt_tokens == len(TURNS[0])
    added = ["", *TURNS[1:]]
    assert run.text == "".join(turn + "".join(map(chr, ids)) for turn, ids in zip(added, generated))
    assert (run.cache_bytes, run.payload_bytes) == (memory.bytes, memory.payload_bytes)
    assert run.levels == memory.tokens
    assert all(run.levels.values()), "the settings must bring about every level"
    assert sum(run.levels.values()) == config.num_hidden_layers * config.num_key_value_heads * seen


def test_run_equals_plain_generation_with_a_dense_cache() -> None:
    config = AutoModelForCausalLM.from_pretrained(TINY_LM).config
    generated, seen = generate_turns(DynamicCache(config=config))
    run = compare.execute(job(DYNAMIC))
    assert run.generated == generated
    bfloat16_bytes = 2
    per_token = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * bfloat16_bytes
    assert run.cache_bytes == per_token * seen
    assert run.levels is None and run.payload_bytes is None


def test_the_end_of_the_prompt_stands_right_before_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """What loading prints comes before both."""
    given = dataclasses.replace(job(DIFFKV), turns=TURNS[:1], stream=True)
    (answer,) = compare.execute(given).answers
    assert answer.endswith("\n") and len(TURNS[0]) > 60
    assert capsys.readouterr().out == f"... {TURNS[0][-60:]}{answer}"
    assert compare.execute(dataclasses.replace(given, echo=False)).answers == [answer]
    assert capsys.readouterr().out == answer


def test_generate_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "folder"
    text = PROMPT_FILE.read_text().removesuffix("\n")[-900:]
    (tmp_path / "prompt.txt").write_text(text + "\n")
    arguments = ["generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--then", "?zzz=", "--max-new-tokens", "6"]
    arguments += ["--alpha-high", "1.5", "--alpha-low", "0.2", "--window", "16", "--high", "k8v8", "--low", "K4V4"]
    assert main([*arguments, "--output", str(output)]) == 0
    printed = capfd.readouterr()
    figures = json.loads((output / "figures.json").read_text())
    dense, diffkv = figures["runs"][DYNAMIC], figures["runs"][DIFFKV]

    config = figures["config"]
    assert (config["alpha_high"], config["alpha_low"], config["window"]) == (1.5, 0.2, 16)
    assert (config["high"]["k_bits"], config["high"]["v_bits"]) == (8, 8)
    assert (config["low"]["k_bits"], config["low"]["v_bits"]) == (4, 4)
    assert dense["prompt_tokens"] == diffkv["prompt_tokens"] == len(text)
    assert [len(ids) for ids in diffkv["generated"]] == [6, 6]
    # nobody looks at stdout: it gets the text alone
    assert printed.out == "".join(answer.removesuffix("\n") + "\n" for answer in diffkv["answers"])
    assert [len(answer) for answer in diffkv["answers"]] == [6, 6] and figures["answers"] == diffkv["answers"]
    assert diffkv["text"] == diffkv["answers"][0] + "?zzz=" + diffkv["answers"][1]
    assert diffkv["dense_bytes"] == dense["cache_bytes"]
    assert diffkv["cache_bytes"] < dense["cache_bytes"]
    for count in (dense["cache_bytes"], diffkv["cache_bytes"], diffkv["payload_bytes"], diffkv["peak_bytes"]):
        assert (f"{count / 1e6:,.2f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB") in printed.err
    assert f"{diffkv['cache_bytes'] / dense['cache_bytes']:.1%}" in printed.err
    levels, heads = diffkv["levels"], 6 * 2
    others = sum(levels.values()) - levels["window"]
    said = f"{diffkv['seen_tokens']:,} tokens, {levels['window'] // heads} of them uncompressed; of the others "
    for name, label in (("high", "high (K8V8)"), ("low", "low (K4V4)"), ("pruned", "pruned")):
        said += f"{label} {levels[name] / others:.0%}, "
    assert said.rstrip(", ") + "." in " ".join(printed.err.split())
    assert min(run[key] for run in (dense, diffkv) for key in ("prompt_seconds", "tokens_per_second")) > 0
    if sys.platform == "linux":
        # the text alone is far below what a process with PyTorch and a model takes
        assert min(dense["above_model_bytes"], diffkv["above_model_bytes"]) >= 0
        assert min(dense["peak_bytes"], diffkv["peak_bytes"]) > 100e6
    check_bar_picture(output / "levels.png", diffkv["levels"])


def check_bar_picture(path: Path, levels: dict[str, int]) -> None:
    """All bars have the same length, so the area of a colour is the level's share of all tokens."""
    colors = pytest.importorskip("matplotlib.colors")
    image = pytest.importorskip("matplotlib.image").imread(path)
    area = {}
    for name, color in LEVELS.items():
        distance = abs(image[..., :3] - colors.to_rgb(color)).max(-1)
        area[name] = int((distance < 0.01).sum())
    for name, count in levels.items():
        assert count > 0
        # legend patches and rounding to pixels
        assert area[name] / sum(area.values()) == pytest.approx(count / sum(levels.values()), abs=0.02)


# of a head that has kept two of four tokens uncompressed
LAYER = {"layer_idx": 0, "high": [1], "low": [1], "window": [2], "pruned": [0], "precisions": ["K8V4/K4V2"]}


def run_of(generated: list[list[int]], **changes) -> FinishedRun:
    base = FinishedRun(
        cache=DIFFKV,
        text="text",
        generated=generated,
        prompt_tokens=3,
        seen_tokens=5,
        cache_bytes=400_000,
        payload_bytes=300_000,
        peak_bytes=None,
        above_model_bytes=None,
        peak_source="nothing",
        prompt_seconds=0.5,
        tokens_per_second=None,
        levels={"high": 1, "low": 1, "window": 2, "pruned": 0},
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    "first, second, agreement, same",
    [
        ([[1, 2, 3]], [[1, 2, 3]], (3, 3, 3), None),
        ([[1, 2, 3]], [[9, 2, 3]], (3, 0, 2), 0),
        ([[1, 2, 3, 4]], [[1, 2]], (4, 2, 2), 2),
        ([[1, 2], [3, 4]], [[1], [3, 5]], (4, 1, 2), 1),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], (4, 3, 3), 3),
    ],
)
def test_tokens_compared(first: list, second: list, agreement: tuple, same: int | None) -> None:
    """Counts tokens that agree and tokens before the first difference, in both orders of the two runs."""
    for one, other in ((first, second), (second, first)):
        assert dataclasses.astuple(Agreement.of(one, other)) == agreement
        assert same_tokens(run_of(one), run_of(other)) == same


def test_comparison_tells_what_is_unknown_and_what_differs() -> None:
    dense = run_of([[1, 2]], cache=DYNAMIC, cache_bytes=800_000, text="dense words here", tokens_per_second=12.34)
    compressed = run_of([[1, 3]], text="other words here", num_layers=4, layers=[LAYER])
    table = comparison(compressed, dense)
    lines = {line[:20].strip(): line.split() for line in table.splitlines()}
    assert lines["cache, real bytes"][-5:] == ["0.80", "MB", "0.40", "MB", "50.0%"]
    assert lines["cache, payload only"][-5:] == ["0.80", "MB", "0.30", "MB", "37.5%"]
    assert lines["peak memory"][-2:] == ["unknown", "unknown"]
    assert lines["decoding"][-3:] == ["12.3", "tok/s", "-"]
    assert "The texts differ from token 2 on and share 80% of their words." in " ".join(table.split())
    assert "[-dense-]{+other+} words here" in table
    assert "1 of 4 layers are compressed" in table
    assert "4 tokens, 2 of them uncompressed; of the others high (K8V4) 50%, low (K4V2) 50%." in " ".join(table.split())


def test_summary_of_one_run() -> None:
    text = comparison(run_of([[1]], dense_bytes=800_000))
    assert "0.40 MB" in text and "50.0%" in text and "saves nothing" not in text
    assert "saves nothing" in comparison(run_of([[1]], dense_bytes=400_000))
    none = comparison(run_of([[1]], dense_bytes=400_000, num_layers=4, layers=[]))
    assert "0 of 4 layers are compressed" in none and "saves nothing" not in none
    levels = {"high": 9, "low": 0, "window": 9, "pruned": 0}
    lossless = run_of([[1]], dense_bytes=400_000, payload_bytes=400_000, levels=levels)
    assert "Nothing is saved: every token is stored as it is." in comparison(lossless)


def test_narrow_terminals_get_a_line_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    dense = run_of([[1, 2]], cache=DYNAMIC, cache_bytes=800_000)
    lines = comparison(run_of([[1, 2]]), dense).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[lines.index("cache, real bytes") + 1 :][:3] == [
        "  DynamicCache: 0.80 MB",
        "  DiffKV: 0.40 MB",
        "  DiffKV / dense: 50.0%",
    ]
    assert "Both caches wrote the same 2 tokens." in lines


@pytest.mark.parametrize(
    "old, new, share, marked",
    [
        ("a b", "a b", 1.0, "a b"),
        ("a b", "a c", 2 / 3, "a [-b-]{+c+}"),
        ("a b c", "a c", 3 / 4, "a [-b -]c"),
        ("", "a", 0.0, "{+a+}"),
    ],
)
def test_word_difference(old: str, new: str, share: float, marked: str) -> None:
    assert word_difference(old, new) == (pytest.approx(share, abs=1e-9), marked)


def test_clock_counts_prompts_and_decoding_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    streamer = compare._TimedStreamer(tokenizer, job(DYNAMIC))
    for turn in ((10.0, 12.0, 12.5, 13.0), (20.0, 21.0, 22.0), (30.0, 39.0)):
        for i, now in enumerate(turn):
            monkeypatch.setattr(compare.time, "perf_counter", lambda now=now: now)
            streamer.put(torch.tensor([[65, 66]]) if i == 0 else torch.tensor([65]))
        streamer.end()
    streamer.close()
    assert streamer.prompt_seconds == 2.0
    assert streamer.tokens_per_second == 3 / (1.0 + 1.0 + 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the resident peak can only be reset on Linux")
def test_peak_memory_remembers_what_was_freed() -> None:
    size = 1 << 27
    torch.ones(4 * size, dtype=torch.uint8)
    # what earlier tests freed may be taken again without a rise
    give_back_memory()
    peak = PeakMemory(torch.device("cpu"))
    torch.ones(size, dtype=torch.uint8)
    highest, above = peak.read()
    assert 0.95 * size < above < 2 * size
    assert highest > above


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Job]]:
    """Jobs that are noted instead of run, by where they would run."""
    jobs: dict[str, list[Job]] = {"run_in_fresh_process": [], "execute_here": []}
    for name, noted in jobs.items():
        monkeypatch.setattr(compare, name, lambda job, noted=noted: noted.append(job) or run_of([[1]], dense_bytes=1))
    return jobs


def test_text_that_just_fits_is_not_refused(started: dict, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--prompt", "a" * 2000, "--then", "b" * 1968]) == 0
    assert [job.cache for job in started["run_in_fresh_process"]] == [DIFFKV, DYNAMIC]
    # without --output nothing is written
    assert not list(tmp_path.iterdir())


def test_options_reach_the_runs(started: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("caf\u00e9\n".encode())))
    sampling = "--sample --seed 3 --temperature 0.7 --top-p 0.9 --top-k 5".split()
    fields = "--high k8v8 --rotate --no-center --window 9 --sinks 2 --max-bytes 1.5MiB --alpha-low 0.5".split()
    assert main(["generate", "-", *sampling, *fields, "--quiet"]) == 0
    diffkv, dense = started["run_in_fresh_process"]
    assert diffkv.turns == ["caf\u00e9"] and diffkv.quiet and not diffkv.echo and diffkv.stream
    assert (diffkv.sample, diffkv.seed) == (True, 3)
    assert diffkv.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    expected = DiffKVConfig(
        high=(8, 8), rotate=True, center=False, window=9, sinks=2, max_bytes=3 << 19, alpha_high=1.0, alpha_low=0.5
    )
    assert DiffKVConfig.from_dict(diffkv.config) == expected
    assert dataclasses.replace(dense, cache=DIFFKV, stream=True) == diffkv


def test_lossless_and_saved_configurations(started: dict, tmp_path: Path) -> None:
    DiffKVConfig(alpha_high=3.0, window=17).save_pretrained(tmp_path)
    arguments = ["generate", "text", "--no-compare", "--quiet"]
    assert main([*arguments, "--lossless", "--window", "5"]) == 0
    assert main([*arguments, "--config", str(tmp_path), "--alpha-low", "0.25"]) == 0
    configs = [DiffKVConfig.from_dict(job.config) for job in started["execute_here"]]
    assert configs[0] == DiffKVConfig.lossless(window=5)
    assert configs[1] == DiffKVConfig(alpha_high=3.0, window=17, alpha_low=0.25)


def test_json_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = PROMPT_FILE.read_text()[:300]
    assert main(["generate", text, "--no-compare", "--json", "--max-new-tokens", "3", "--sample", "--top-k", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["runs"][DIFFKV]
    assert found["answers"] == run["answers"] and len(run["generated"][0]) == 3 and run["prompt_tokens"] == 300
    assert found["sampling"] == {"top_k": 1} and found["versions"]["torch"] == torch.__version__
    assert "agreement" not in found and list(found["runs"]) == [DIFFKV]


def test_model_that_cannot_be_compressed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("deepseek_v32", **LATENT).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LM / name, tmp_path / "model" / name)
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "abc", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capfd.readouterr().err
    line = error.splitlines()[-1]
    assert line.startswith("hf-diffkv: --model ") and "deepseek_v32 keeps DynamicIndexedLayer" in line
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "figures.json").exists()
