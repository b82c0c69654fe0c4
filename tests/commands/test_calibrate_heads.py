"""`hf-diffkv calibrate --ratio`, and the configuration it writes, at other ratios."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.calibration import heads as heads_module
from hf_diffkv.cli import main
from hf_diffkv.compat import passing
from hf_diffkv.config.allocation import allocate
from hf_diffkv.config.files import CONFIG_NAME
from hf_diffkv.config.found import FOLDER_VARIABLE, measured_of
from hf_diffkv.config.sensitivity import Sensitivity

TINY_LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"


def command(output: Path, *more: str) -> int:
    return main(["calibrate", "--model", str(TINY_LM), "--output", str(output), "--quiet", "--length", "900", *more])


@pytest.fixture(scope="module", autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


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
    monkeypatch.setattr(heads_module, "_measured", refuse)
    assert command(calibrated, "--ratio", "0.3") == 0
    assert DiffKVConfig.from_pretrained(calibrated) == larger
    with pytest.raises(ValueError, match="target_ratio=0.05 is below what K3V2 takes of every head, 0.172"):
        config.with_ratio(0.05)
    with pytest.raises(ValueError, match="what the heads of a model lose; `hf-diffkv calibrate --model MODEL --ratio"):
        DiffKVConfig().with_ratio(0.2)


@pytest.mark.slow
def test_a_text_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A long text of some words. " * 200)
    assert command(tmp_path, "--ratio", "0.2", "--text", str(tmp_path / "text.txt")) == 0
    assert DiffKVConfig.from_pretrained(tmp_path).calibration["text"] == str(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "0.1"], "target_ratio=0.1 is below what K3V2 takes of every head, 0.172; raise it"),
        (["--ratio", "0"], "target_ratio=0.0 must be a number above 0"),
        (["--ratio", "0.2", "--max-kl", "1", "--task", "text"], "leave --max-kl, --task out"),
        (["--ratio", "0.2", "--length", "5000"], "lower length"),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    assert command(tmp_path, *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / CONFIG_NAME).exists()
