"""What somebody meets in the first hour: folders that are not there, misspelt names, packages that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_diffkv.cli import main
from hf_diffkv.evaluation.errors import EvaluationError
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


def test_where_the_number_stands_both_are_said() -> None:
    """A quarter of the memory is of models whose heads were measured."""
    for name in ("README.md", "docs/index.md", "mkdocs.yml"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()[:12]
        assert "quarter" in " ".join(lines) and "30 to 32 %" in " ".join(lines)
