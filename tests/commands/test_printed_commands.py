"""No advice fails: each command that a message, a help text or a page prints is one that can be typed."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import click
import pytest
from printed_commands import FILLED, Printed, printed_commands

from hf_diffkv import DiffKVConfig
from hf_diffkv.cli import main
from hf_diffkv.commands import COMMANDS, load
from hf_diffkv.evaluation.verification import Outcome

PRINTED = printed_commands()
# what pages and messages leave open
OPEN = {"N": "2", "FOLDER": "folder", "NAME": "text"}
MODELS = ("MODEL", FILLED, "smollm2")
# run for minutes, serve until they are stopped, or are the harness's
LONG = ("calibrate", "evaluate", "serve", "demo", "lm-eval")
ADVISED = [
    each
    for each in PRINTED
    if (each.advice or each.where == "docs/troubleshooting.md")
    and not (each.names_only and "--" not in each.text)
    and each.words[0] not in LONG
]


def typed(printed: Printed) -> list[str]:
    return [OPEN.get(word, word) for word in printed.words]


def parse(words: list[str]) -> None:
    try:
        load(words[0]).make_context(words[0], words[1:])
    except click.exceptions.Exit:
        pass


def test_the_collection_finds_what_is_known() -> None:
    texts = {(each.where, each.text) for each in PRINTED}
    assert len(PRINTED) > 100
    assert ("README.md", "plan --model smollm2 --memory 24GB # what fits, from the configuration alone") in texts
    assert ("hf_diffkv/heads/lookup.py", f"calibrate --model {FILLED}") in texts
    assert (
        "hf_diffkv/commands/generate.py",
        "generate --model smollm2 --preset small --prompt-file report.txt",
    ) in texts


@pytest.mark.parametrize("printed", PRINTED, ids=lambda each: f"{each.where}:{each.text[:40]}")
def test_each_can_be_typed(printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed.words[0] in COMMANDS
    if not printed.names_only:
        return parse(typed(printed))
    name, *option = printed.words
    # people type what a message says as it stands
    if printed.advice and option:
        parse(typed(printed))
    assert not option or any(option[0] in each.opts for each in load(name).params)


@pytest.mark.parametrize("printed", ADVISED, ids=lambda each: each.text[:60])
def test_advice_runs(
    printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tiny-lm as the model; `generate` and `chat` write little."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("@sky=0400\n" * 30 + "?sky=")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    words = ["tiny-lm" if word in MODELS else word for word in typed(printed)]
    if words[0] in ("generate", "chat", "inspect", "bench") and "--model" not in words:
        words += ["--model", "tiny-lm"]
    if words[0] == "generate":
        words += ["--no-compare", "--max-new-tokens", "4"]
    if words[0] == "chat":
        words += ["--plain"]
    if words[0] == "bench":
        words += ["--context", "200", "--steps", "2"]
    assert main(words) == 0, capsys.readouterr().err


def test_models_in_printed_commands_are_quoted() -> None:
    from hf_diffkv.commands.plan import _draw_loss
    from hf_diffkv.commands.verify import _good

    with pytest.raises(click.UsageError) as refused:
        _draw_loss(DiffKVConfig(), (), Path("loss.png"), "my model", True)
    good = _good("my model", Outcome("chosen", 0.0, 1.0, bytes=1, dense_bytes=2), 0.01)
    for said in (good, refused.value.message):
        command = re.search("`hf-diffkv (.*)`", said)[1]
        assert shlex.split(command) == ["calibrate", "--model", "my model"]


def test_the_setting_that_verify_names_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_diffkv.commands.verify import _bad

    chosen, better = (Outcome(name, kl, 1.0, bytes=1, dense_bytes=2) for name, kl in (("chosen", 1), ("all K8V4", 0)))
    advice = re.search(r"use (--.*?), which", _bad(chosen, better, 0.01)).group(1)
    assert main(["inspect", "--model", "tiny-lm", *shlex.split(advice), "--json"]) == 0
    assert '"K8V4"' in capsys.readouterr().out
