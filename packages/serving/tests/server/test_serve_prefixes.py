"""Stores in which `hf-diffkv serve` keeps prefixes."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
from batching import AMPLE, LOSSY, chunks, request_config
from hf_diffkv_serving import command as serve
from tiny_models import tiny_model

import hf_diffkv.prefixes
from hf_diffkv.commands.console import Failure


@pytest.mark.parametrize(
    ("given", "folder", "limit"),
    [
        ("", False, AMPLE // 8),
        ("", True, AMPLE // 8),
        ("--prefix-bytes=5MB", False, 5_000_000),
        ("--prefix-bytes=0", True, 0),
        ("--prefix-bytes=0", False, None),
        ("--prefix-bytes=0GB", False, None),
    ],
)
def test_prefixes_are_kept_beside_the_budget(given: str, folder: bool, limit: int | None, tmp_path: Path) -> None:
    model = tiny_model("llama")
    engine = model.init_continuous_batching(request_config(LOSSY), chunks())
    place = [f"--prefix-folder={tmp_path / 'prefixes'}"] if folder else []
    options = SimpleNamespace(**serve.command.make_context("serve", ["tiny-lm", *given.split(), *place]).params)
    serve._use_prefixes(options, model, LOSSY, engine)
    engine.stop()
    if limit is None:
        assert engine.prefixes is None
    else:
        assert engine.prefixes._tiers.memory[0].limit == limit and engine.prefixes.has_folder == folder


def test_models_without_prefixes_are_served_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **limits: object) -> None:
        raise ValueError("a prefix store works in one process")

    monkeypatch.setattr(hf_diffkv.prefixes, "PrefixStore", refuse)
    engine = SimpleNamespace(memory=lambda: SimpleNamespace(max_bytes=AMPLE))
    options = SimpleNamespace(prefix_bytes=None, prefix_folder=None, prefix_folder_bytes=None)
    serve._use_prefixes(options, None, LOSSY, engine)
    options.prefix_bytes = 1
    with pytest.raises(ValueError, match="one process"):
        serve._use_prefixes(options, None, LOSSY, engine)


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(folder: Path, *given: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    options = SimpleNamespace(prefix_bytes=1, prefix_folder=tmp_path / "new", prefix_folder_bytes=None)
    model = tiny_model("llama")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        Failure, match=f"^--prefix-folder {tmp_path / 'new'} cannot be created: Read-only file system.$"
    ):
        serve._use_prefixes(options, model, LOSSY, None)
