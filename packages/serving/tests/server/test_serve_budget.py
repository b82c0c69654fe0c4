"""The budget of `hf-diffkv serve`, and whether it is precise until that is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measured_heads import measured

pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)
from hf_diffkv_serving import command  # noqa: E402
from hf_diffkv_serving.command import ON_CPU  # noqa: E402

from hf_diffkv.cli import main  # noqa: E402
from hf_diffkv.config import DiffKVConfig, Precision  # noqa: E402
from hf_diffkv.config.until_full import rungs_of  # noqa: E402
from hf_diffkv.heads import lookup  # noqa: E402
from hf_diffkv.running.models import load_model  # noqa: E402

SERVE = ["serve", "tiny-lm", "--port", "0", "--device", "cpu", "--quiet"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Options and configurations of the engines that are made; the command ends there."""
    found: list[tuple[Any, Any]] = []

    def engine(options: Any, model: Any, config: Any) -> Any:
        found.append((options, config))
        raise ValueError("far enough")

    monkeypatch.setattr(command, "_engine", engine)
    return found


@pytest.mark.parametrize(
    "arguments, max_bytes, precise",
    [
        (["--max-bytes", "80%"], "80%", None),
        (["--max-bytes", "8GB", "--until-full"], 8 * 10**9, "K8V8"),
        (["--max-bytes", "75 %", "--until-full", "--preset", "small"], "75%", "K8V8"),
        (["--until-full", "--memory-share", "0.25"], "25%", "K8V8"),
        (["--until-full"], f"{100 * ON_CPU:g}%", "K8V8"),
        ([], None, None),
    ],
)
def test_budgets_of_a_server(arguments: list[str], max_bytes: Any, precise: str | None, engines: list) -> None:
    assert main([*SERVE, *arguments]) == 1
    ((options, config),) = engines
    assert config.max_bytes == max_bytes
    named = isinstance(config.until_full, Precision)
    assert named == (precise is not None) and (not named or config.until_full.name == precise)
    # Transformers would take the share a second time
    assert "max_memory_percent" not in command._batching(options)


@pytest.mark.parametrize("preset, differs", [("balanced", False), ("small", True)])
def test_measured_heads_have_final_precisions_for_a_budget(
    preset: str, differs: bool, engines: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path))
    model = load_model("tiny-lm", "auto", "cpu", quiet=True)
    lookup.keep(measured(model))
    assert main([*SERVE, "--until-full", "--max-bytes", "8MB", "--preset", preset]) == 1
    ((_, config),) = engines
    # those of a budget, which may be others without one
    assert config.head_precisions == DiffKVConfig.for_model(model, preset=preset, max_bytes="8MB").head_precisions
    assert differs == (config.head_precisions != DiffKVConfig.for_model(model, preset=preset).head_precisions)
    layers = range(len(config.head_precisions))
    assert {rungs_of(config, index).high.name for index in layers} <= {"K8V8", "K6V5", "K5V4"}
    assert any(rungs_of(config, index).alpha_high != 0.0 for index in layers)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--lossless"], "until_full=K8V8 must need more bits than the final precision K16V16"),
        (
            ["--high", "K8V4", "--low", "K4V2", "--alpha-high", "1"],
            "until_full=K8V8 needs a final precision for all tokens",
        ),
        (["--max-bytes", "0%"], "is not a share of the free memory"),
    ],
)
def test_what_cannot_be_lowered_is_refused(
    arguments: list[str], said: str, engines: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SERVE, "--until-full", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not engines
