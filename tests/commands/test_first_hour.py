"""What somebody meets in the first hour: folders that are not there, misspelt names, packages that are missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hf_diffkv.cli import main
from hf_diffkv.commands import lm_eval
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.timing import timed_method
from hf_diffkv.extras import install
from hf_diffkv.running.models import load_config, resolve_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["./models/foo", "../foo", "~/foo", "/no/such/foo", "models/foo/bar", "foo/", ".\\\\foo"]
)
def test_a_folder_that_is_not_there_is_said_to_be_missing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        resolve_model(name)
    for command in (["generate", "a"], ["chat"], ["plan", "--memory", "1GB"], ["inspect"], ["verify"], ["bench"]):
        assert main([*command, "--model", name]) == 2
        said = capsys.readouterr().err
        assert f"there is no folder {name!r}." in said and "Hub" not in said.replace("Hub id", "")


def test_a_name_that_may_be_either_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = "there is no folder 'models/foo' here, and on the Hub: "
    assert main(["inspect", "--model", "models/foo"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(EvaluationError, match=said):
        load_config("models/foo")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("statik", "unknown cache 'statik': did you mean static"),
        ("difkv", "unknown cache 'difkv': did you mean diffkv?"),
        ("quantoo:4", "unknown cache 'quantoo': did you mean quanto?"),
        ("diffkv:smal", "option 'smal' of a diffkv method .* did you mean small?"),
        ("diffkv:losless", "did you mean lossless?"),
    ],
)
def test_bench_knows_what_was_meant(name: str, said: str) -> None:
    with pytest.raises(EvaluationError, match=said.replace("?", r"\?")):
        timed_method(name, 10)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_of_lm_eval_needs_no_harness(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        lm_eval.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name)
    )
    assert main(["lm-eval", *arguments]) == 0
    said = capsys.readouterr().out
    assert (
        "cache=METHOD" in said
        and f"The harness is not installed, so its own help is missing here: {install('eval')}" in said
    )


def test_running_lm_eval_without_the_harness_says_how_to_install_it() -> None:
    program = (
        "import sys; sys.modules['lm_eval'] = None; from hf_diffkv.cli import main; sys.exit(main(['lm-eval', 'run']))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 2 and install("eval") in found.stderr and found.stderr.count("\n") == 1


def test_where_the_number_stands_both_are_said() -> None:
    """A quarter of the memory is of models whose heads were measured."""
    for name in ("README.md", "docs/index.md", "mkdocs.yml"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()[:12]
        assert "quarter" in " ".join(lines) and "30 to 32 %" in " ".join(lines)
