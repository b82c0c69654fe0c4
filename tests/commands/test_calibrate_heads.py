"""`hf-diffkv calibrate` for heads, with and without options, and the configuration it writes, at other ratios."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.calibration import documents as documents_module
from hf_diffkv.calibration import heads as heads_module
from hf_diffkv.cli import main
from hf_diffkv.commands import calibrate as calibrate_module
from hf_diffkv.compat import passing
from hf_diffkv.config.presets import RATIOS
from hf_diffkv.heads.allocation import allocate
from hf_diffkv.heads.hub import CONFIG_NAME
from hf_diffkv.heads.lookup import FOLDER_VARIABLE, HINTS, measured_of
from hf_diffkv.heads.sensitivity import Sensitivity

SHORT = Path(__file__).with_name("test_presets.py")
TINY_LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"


def command(output: Path, *more: str) -> int:
    return main(["calibrate", "--model", str(TINY_LM), "--output", str(output), "--quiet", "--length", "900", *more])


@pytest.fixture(scope="module", autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@dataclass(frozen=True)
class Run:
    """What a command printed."""

    code: int
    out: str
    err: str


def run(*arguments: str) -> Run:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(["calibrate", *arguments])
    return Run(code, out.getvalue(), err.getvalue())


def advice(model: PreTrainedModel) -> list[str]:
    """Arguments of the command that is advised for a model whose heads were not measured."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(HINTS)
    logger.addHandler(handler)
    try:
        DiffKVCache(model)
    finally:
        logger.removeHandler(handler)
    (found,) = re.findall("`hf-diffkv calibrate ([^`]+)`", messages[0])
    return shlex.split(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A copy whose heads nobody measured, at a path of its own."""
    folder = tmp_path_factory.mktemp("model")
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    with torch.no_grad():
        # other weights than those that another test of this file measures
        model.lm_head.weight.mul_(1.01)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_LM).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def first_run(model: PreTrainedModel, user_folder: Path) -> tuple[list[str], Run, Run]:
    """The command with nothing but a model, interrupted and run again, on short documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "DOCUMENT_LENGTH", 900)
        advised, original, calls = advice(model), heads_module.Following, []

        def measure(*arguments: Any) -> heads_module.Following:
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original(*arguments)

        patch.setattr(heads_module, "Following", measure)
        interrupted = run("--model", model.name_or_path)
        return advised, interrupted, run("--model", model.name_or_path)


def output_folder(user_folder: Path) -> Path:
    (path,) = (user_folder / "runs" / "heads").glob(f"*/{CONFIG_NAME}")
    return path.parent


def test_a_model_is_all_it_needs(
    model: PreTrainedModel, first_run: tuple[list[str], Run, Run], user_folder: Path
) -> None:
    done = first_run[2]
    assert done.code == 0
    config = DiffKVConfig.from_pretrained(output_folder(user_folder))
    assert config.calibration["target_ratio"] == RATIOS["balanced"]
    again = AutoModelForCausalLM.from_pretrained(model.name_or_path)
    cache = DiffKVCache(again)
    assert cache.config == config and cache.stores.moments is not None


def test_the_advised_command_works_as_it_stands(
    first_run: tuple[list[str], Run, Run], user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(documents_module, "DOCUMENT_LENGTH", 900)
    monkeypatch.setattr(heads_module, "Following", refuse)
    assert first_run[0][0] == "--model" and len(first_run[0]) == 2
    done = run(*first_run[0])
    assert done.code == 0 and "DiffKVCache(model)" in done.out
    assert DiffKVConfig.from_pretrained(output_folder(user_folder)).calibration["target_ratio"] == 0.235
    # and so do the commands that it advises itself
    advised = [shlex.split(line) for line in done.out.splitlines() if line.startswith("  hf-diffkv ")]
    assert [command[1] for command in advised] == ["verify", "calibrate"]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert [main(command[1:]) for command in advised] == [0, 0]
    run("--model", first_run[0][1])


def test_advice_leads_to_the_same_measurements(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(heads_module, "Following", refuse)
    done = run("--model", str(TINY_LM), "--output", str(calibrated), "--length", "900", "--ratio", "0.21")
    advised = [shlex.split(line) for line in done.out.splitlines() if line.startswith("  hf-diffkv calibrate")]
    assert run(*advised[0][2:]).code == 0
    assert DiffKVConfig.from_pretrained(calibrated).calibration["target_ratio"] == RATIOS["small"]
    assert run("--model", str(TINY_LM), "--output", str(calibrated), "--length", "900", "--ratio", "0.21").code == 0


def test_an_interrupted_command_says_how_to_go_on(first_run: tuple[list[str], Run, Run]) -> None:
    _, interrupted, done = first_run
    assert interrupted.code == 130
    last = interrupted.err.splitlines()[-1]
    assert last.startswith("hf-diffkv: interrupted. Measurements so far are kept in ") and "the same command" in last
    assert "2 of 8 documents were measured before" in done.err.splitlines()
    assert [line.split(" (")[0] for line in done.err.splitlines() if line.startswith("document ")] == [
        f"document {number} of 8" for number in range(3, 9)
    ]
    for one in (interrupted, done):
        assert "have not been measured" not in one.err


def test_figures_are_those_of_the_configuration(first_run: tuple[list[str], Run, Run], user_folder: Path) -> None:
    block = DiffKVConfig.from_pretrained(output_folder(user_folder)).calibration
    measured = Sensitivity.from_dict(block["sensitivity"])
    plain = Precision(5, 4)
    heads = [(layer, head) for layer in range(6) for head in range(2)]
    loss = sum(measured.loss(layer, head, plain) for layer, head in heads)
    rows = [re.split(r"  +", line.strip()) for line in first_run[2].out.splitlines()[:3]]
    # 9 bits for an element of key and value, and 16 bits of scale and zero point for each vector, over 2 x 64 x 16
    assert rows[1:] == [
        ["each head its own bits", f"{block['ratio']:.1%}", f"{block['predicted_kl']:.4f}"],
        ["not calibrated: K5V4 for all", f"{(9 * 64 + 2 * 16) / (2 * 64 * 16):.1%}", f"{loss:.4f}"],
    ]


@pytest.mark.parametrize(
    ("arguments", "heads"),
    [
        ([], True),
        (["--ratio", "0.2"], True),
        (["--text", "a.txt", "--length", "500"], True),
        (["--thresholds"], False),
        (["--max-kl", "0.01"], False),
        (["--text", "a.txt", "--max-kl", "0.005"], False),
        (["--task", "dictionary", "--max-loss", "0.05"], False),
        (["--documents", "2"], False),
        (["--per-layer"], False),
        (["--method", "diffkv:window=32"], False),
        (["--alpha-high", "1,2"], False),
    ],
)
def test_which_of_both_is_measured(arguments: list[str], heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(calibrate_module, "calibrate_heads", lambda options: called.append("heads"))
    monkeypatch.setattr(calibrate_module, "calibrate_thresholds", lambda options: called.append("thresholds"))
    assert main(["calibrate", "--model", str(TINY_LM), *arguments]) == 0
    assert called == ["heads" if heads else "thresholds"]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    assert command(folder, "--ratio", "0.21") == 0
    return folder


def test_a_configuration_with_a_precision_for_each_head(calibrated: Path) -> None:
    config = DiffKVConfig.from_pretrained(calibrated)
    block = config.calibration
    measured = Sensitivity.from_dict(block["sensitivity"])
    assert (measured.model_type, measured.shapes, measured.element_bytes) == ("llama", ((2, 64, 64),) * 6, 2)
    found = allocate(measured, 0.21)
    assert config == DiffKVConfig(head_precisions=found.precisions, adaptive_rounding=True, metadata_bits=16, window=32)
    assert block["ratio"] == found.ratio <= 0.21 and block["predicted_kl"] == found.loss
    assert (block["target_ratio"], block["model"], block["length"]) == (0.21, str(TINY_LM), 900)


def test_what_was_measured_is_found_by_the_weights(calibrated: Path, user_folder: Path) -> None:
    found = measured_of(AutoModelForCausalLM.from_pretrained(TINY_LM))
    assert found is not None and (user_folder / f"{found.model_digest}.json").is_file()
    assert found.to_dict() == DiffKVConfig.from_pretrained(calibrated).calibration["sensitivity"]


def test_the_cache_takes_what_the_ratio_says(calibrated: Path) -> None:
    config = DiffKVConfig.from_pretrained(calibrated)
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, config)
    with torch.no_grad():
        model(torch.randint(128, (1, 2000), generator=torch.Generator().manual_seed(0)), **passing(cache))
    tokens = 2000 - config.window - config.sinks
    stored = sum(store.layout.high.token_bytes * int(store.high_count.sum()) for store in cache.stores.all)
    stored += sum(store.layout.low.token_bytes * int(store.low_count.sum()) for store in cache.stores.all)
    assert stored == pytest.approx(config.calibration["ratio"] * tokens * 6 * 2 * 2 * 64 * 2)


def test_another_ratio_measures_nothing(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("measured again")

    config = DiffKVConfig.from_pretrained(calibrated)
    larger = config.with_ratio(0.3)
    assert larger.with_ratio(0.21) == config and larger.calibration["sensitivity"] == config.calibration["sensitivity"]
    assert larger.calibration["predicted_kl"] < config.calibration["predicted_kl"]
    monkeypatch.setattr(heads_module, "Following", refuse)
    assert command(calibrated, "--ratio", "0.3") == 0
    assert DiffKVConfig.from_pretrained(calibrated) == larger
    with pytest.raises(ValueError, match="target_ratio=0.05 is below what K2V2 needs for every head, 0.141"):
        config.with_ratio(0.05)
    with pytest.raises(ValueError, match="what a model's heads lose; `hf-diffkv calibrate --model MODEL`"):
        DiffKVConfig().with_ratio(0.2)


@pytest.mark.slow
def test_a_text_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A long text of some words. " * 200)
    assert command(tmp_path, "--ratio", "0.2", "--text", str(tmp_path / "text.txt")) == 0
    assert DiffKVConfig.from_pretrained(tmp_path).calibration["text"] == str(tmp_path / "text.txt")


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_DIFFKV_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr("hf_diffkv.running.models.load_model", lambda *_: pytest.fail("loads a model"))
    assert main(["calibrate", "--model", "tiny-lm", "--output", str(tmp_path / "output")]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "file" / "folder") in message and "set HF_DIFFKV_CACHE to another folder" in message
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "0.1"], "--ratio 0.1 is below what K2V2 needs for every head, 0.141; raise it, or choose"),
        (["--ratio", "0"], "--ratio 0.0 must be a number above 0"),
        (["--ratio", "0.2", "--max-kl", "1", "--task", "text"], "--max-kl, --task measures thresholds for choosing"),
        (["--ratio", "0.2", "--documents", "2"], "--documents measures thresholds for choosing tokens"),
        (["--ratio", "0.2", "--thresholds"], "--thresholds measures thresholds"),
        (["--text", str(SHORT), "--length", "4000"], "4 documents need 16128; lower --length, or give a longer text"),
        (["--ratio", "0.2", "--length", "5000"], "lower length"),
        (["--length", "1"], "a prompt of 1 tokens is too short for 12 facts; raise --length."),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    assert command(tmp_path, *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / CONFIG_NAME).exists()
