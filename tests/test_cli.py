"""The command line: a real run end to end, its figures against an independent generation, and helpful errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig, __version__, compare, report
from hf_diffkv.agreement import Agreement
from hf_diffkv.cli import comparison_table, main
from hf_diffkv.compare import DIFFKV, DYNAMIC, Job, Run
from hf_diffkv.evaluation.models import TINY_LM
from hf_diffkv.peak import PeakMemory

PROMPT_FILE = TINY_LM.parents[1] / "prompts" / "recall.txt"
CONFIG = DiffKVConfig(alpha_high=2.0, alpha_low=0.5, window=32)
TURNS = ["@oak=5305\nkey_dim: int, value_dim: int\n" * 6 + "?oak=", "?elm=", "x"]


def job(cache: str, **changes) -> Job:
    base = Job(
        cache=cache,
        model=str(TINY_LM),
        turns=TURNS,
        max_new_tokens=5,
        config=CONFIG.to_dict(),
        dtype="auto",
        device="cpu",
        seed=0,
        sample=False,
    )
    return dataclasses.replace(base, **changes)


def generate_turns(cache) -> tuple[list[list[int]], int]:
    """The same turns by plain `generate()`, and the tokens the cache has seen."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_LM), AutoModelForCausalLM.from_pretrained(TINY_LM)
    text, generated = "", []
    for turn in TURNS:
        text += turn
        ids = tokenizer(text, return_tensors="pt")
        output = model.generate(**ids, past_key_values=cache, max_new_tokens=5, do_sample=False)[0]
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


def test_generate_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "folder"
    text = PROMPT_FILE.read_text().removesuffix("\n")[-900:]
    (tmp_path / "prompt.txt").write_text(text + "\n")
    arguments = ["generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--then", "?zzz=", "--max-new-tokens", "6"]
    arguments += ["--alpha-high", "1.5", "--alpha-low", "0.2", "--window", "16", "--high", "k8v8", "--low", "K4V4"]
    assert main([*arguments, "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    figures = json.loads((output / "figures.json").read_text())
    dense, diffkv = figures["runs"][DYNAMIC], figures["runs"][DIFFKV]

    config = figures["config"]
    assert (config["alpha_high"], config["alpha_low"], config["window"]) == (1.5, 0.2, 16)
    assert (config["high"]["k_bits"], config["high"]["v_bits"]) == (8, 8)
    assert (config["low"]["k_bits"], config["low"]["v_bits"]) == (4, 4)
    assert dense["prompt_tokens"] == diffkv["prompt_tokens"] == len(text)
    assert [len(ids) for ids in diffkv["generated"]] == [6, 6]
    assert f"{text[-60:]}{diffkv['text']}" in printed
    assert diffkv["cache_bytes"] < dense["cache_bytes"]
    for count in (dense["cache_bytes"], diffkv["cache_bytes"], diffkv["payload_bytes"], diffkv["peak_bytes"]):
        assert f"{count / 1e6:,.2f} MB" in printed
    assert f"{diffkv['cache_bytes'] / dense['cache_bytes']:.1%}" in printed
    for name, count in diffkv["levels"].items():
        assert f"{name} {count:,} (" in printed
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
    for name, color in report.LEVELS.items():
        distance = abs(image[..., :3] - colors.to_rgb(color)).max(-1)
        area[name] = int((distance < 0.01).sum())
    for name, count in levels.items():
        assert count > 0
        # legend patches and rounding to pixels
        assert area[name] / sum(area.values()) == pytest.approx(count / sum(levels.values()), abs=0.02)


def test_maps_of_many_heads_show_the_shares() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    layers = [
        report.LayerReport(0, high=(1, 2), low=(3, 2), window=(4, 4), pruned=(2, 2)),
        report.LayerReport(5, high=(5,), low=(0,), window=(5,), pruned=(0,)),
    ]
    figure = report._maps(pyplot, report.MemoryReport(0, 0, 0, 0, {}, tuple(layers)))
    nan = float("nan")
    expected = [
        [[0.1, 0.2], [0.5, nan]],
        [[0.3, 0.2], [0.0, nan]],
        [[0.4, 0.4], [0.5, nan]],
        [[0.2, 0.2], [0.0, nan]],
    ]
    assert [axis.get_title() for axis in figure.axes[:4]] == ["high", "low", "window", "pruned"]
    for axis, shares in zip(figure.axes[:4], expected):
        drawn = torch.tensor(axis.images[0].get_array().filled(nan), dtype=torch.float64)
        torch.testing.assert_close(drawn, torch.tensor(shares, dtype=torch.float64), equal_nan=True)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "5"]
    pyplot.close(figure)


def run_of(generated: list[list[int]], **changes) -> Run:
    base = Run(
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
    "first, second, expected",
    [
        ([[1, 2, 3]], [[1, 2, 3]], (3, 3, 3)),
        ([[1, 2, 3]], [[9, 2, 3]], (3, 0, 2)),
        ([[1, 2, 3, 4]], [[1, 2]], (4, 2, 2)),
        ([[1, 2], [3, 4]], [[1], [3, 5]], (4, 1, 2)),
    ],
)
def test_agreement(first, second, expected) -> None:
    assert dataclasses.astuple(Agreement.of(first, second)) == expected
    assert dataclasses.astuple(Agreement.of(second, first)) == expected


def test_table_tells_what_is_unknown_and_what_differs() -> None:
    dense = run_of([[1, 2]], cache=DYNAMIC, cache_bytes=800_000, text="dense words", tokens_per_second=12.34)
    compressed = run_of([[1, 3]])
    table = comparison_table(compressed, dense, Agreement.of(compressed.generated, dense.generated))
    lines = {line[:20].strip(): line.split() for line in table.splitlines()}
    assert lines["cache, real bytes"][-5:] == ["0.80", "MB", "0.40", "MB", "50.0%"]
    assert lines["cache, payload only"][-5:] == ["0.80", "MB", "0.30", "MB", "37.5%"]
    assert lines["peak memory"][-2:] == ["unknown", "unknown"]
    assert lines["decoding"][-3:] == ["12.3", "tok/s", "-"]
    assert "1 of 2 tokens are equal (50%), the first 1 without a difference" in table
    assert table.index("dense words") > 0


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
    peak = PeakMemory(torch.device("cpu"))
    torch.ones(size, dtype=torch.uint8)
    highest, above = peak.read()
    assert 0.95 * size < above < 2 * size
    assert highest > above


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt-file", "no/such/file.txt"], "cannot read no/such/file.txt: No such file or directory."),
        (["--prompt-file", str(TINY_LM / "model.safetensors")], "is not UTF-8 text."),
        (["--prompt", ""], "nothing to continue"),
        (["--prompt", "a", "--then", ""], "nothing to continue"),
        (["--prompt", "a", "--max-new-tokens", "0"], "nothing to generate"),
        (["--prompt", "a" * 4050], "max_position_embeddings is 4096; shorten the prompt"),
        (["--prompt", "a" * 2000, "--then", "b" * 1969], "has 3969 tokens and 128 are to be generated"),
        (["--prompt", "a", "--high", "INT8"], "--high INT8 is not a precision"),
        (["--prompt", "a", "--low", "K7V4"], "--low K7V4: Precision.k_bits=7 is not supported"),
        (["--prompt", "a", "--low", "K8V8", "--high", "K4V2"], "swap the two precisions"),
        (["--prompt", "a", "--alpha-low", "2"], "alpha_low=2.0 is above alpha_high=1.0"),
        (["--prompt", "a", "--window", "0"], "window=0 must be an integer of at least 1"),
        (["--prompt", "a", "--device", "abacus"], "--device abacus cannot be used"),
        (["--prompt", "a", "--device", "meta"], "--device meta cannot be used"),
        (["--prompt", "a", "--output", "/proc"], "cannot write to /proc"),
        (["--prompt", "a", "--model", "no/such/model/folder"], "cannot load the model no/such/model/folder"),
        (["--prompt", "a", "--model", "smolm2"], "did you mean 'smollm2'?"),
        (["--prompt", "a", "--chat"], "the tokenizer has no chat template"),
        (["--prompt", "a", "--output", __file__], f"cannot write to {__file__}"),
    ],
)
def test_mistakes_are_named_in_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *arguments]) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert printed.err.startswith("hf-diffkv: ") and printed.err.count("\n") == 1
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_text_that_just_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setattr("hf_diffkv.cli.run_in_fresh_process", lambda job: started.append(job) or run_of([[1]]))
    arguments = ["generate", "--prompt", "a" * 2000, "--then", "b" * 1968, "--output", str(tmp_path)]
    assert main(arguments) == 0
    assert [job.cache for job in started] == [DIFFKV, DYNAMIC]


@pytest.mark.parametrize("arguments", [[], ["generate"], ["generate", "--prompt", "a", "--prompt-file", "b"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: hf-diffkv" in capsys.readouterr().err


def test_model_that_cannot_be_compressed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = DeepseekV3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LM / name, tmp_path / "model" / name)
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "abc", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert "hf-diffkv: DiffKV: deepseek_v3 caches latents" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "figures.json").exists()


def test_interrupt_ends_both_processes_in_one_line(tmp_path: Path) -> None:
    """As by Ctrl-C, which reaches all processes of a terminal's foreground group."""
    command = [sys.executable, "-m", "hf_diffkv", "generate", "--prompt", "a" * 600, "--max-new-tokens", "3000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    # a shell has what it runs in the background ignore the signal
    pipes["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([*command, "--output", str(tmp_path)], start_new_session=True, **pipes)
    written = process.stdout.read(70)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert written.startswith(b"... aaa")
    assert process.returncode == 130
    assert errors.decode().endswith("\nhf-diffkv: interrupted.\n") and b"Traceback" not in errors


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["hf-diffkv"].startswith(__version__)
    assert {"python", "platform", "transformers", "triton", "accelerate", "threads"} <= set(lines)
