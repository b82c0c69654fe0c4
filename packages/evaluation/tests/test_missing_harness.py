"""`hf-diffkv lm-eval` without lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hf_diffkv_evaluation.commands import lm_eval

from hf_diffkv.cli import main
from hf_diffkv.extras import install

ROOT = Path(__file__).parents[3]


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
